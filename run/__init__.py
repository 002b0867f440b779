"""What a step calls, and what surrounds a run.

A step computes with these; `model.py` and `--cache plain` have the plain form:

    passes      log-probabilities in micro-batches, common prefixes once; rows joined and split; the
                check that sampler and trainer agree
    caches      the KV caches of sampling, and the drawing of tokens
    dist        sums and random streams over ranks; device, dtype, FSDP2, signals
    report      a step's statistics; samples.jsonl; runs as an HTML page

How a run begins:

    config      the settings as a command line; algorithms in files of their own
    pretrained  Hugging Face folders in and out; new models
    rope        RoPE's frequencies in models for long contexts
    preflight   checks before anything large is allocated
    warm_start  the supervised start
    setup       its models, its problems, its folder

What it leaves behind:

    files       atomic writes, the lock of a folder, logs
    checkpoint  saving and resuming
    show        the terminal
"""

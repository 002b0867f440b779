"""The code around the algorithm: none of it is needed to follow a step.

How a step gets its speed, memory and ranks:

    caches      the KV caches of sampling
    passes      training passes: micro-batches, common prefixes computed once, logits in parts;
                the check that sampler and trainer agree
    dist        device, dtype, ranks, FSDP2, random streams, signals

What a run is made of:

    config      the settings as a command line; algorithms in files of their own
    pretrained  Hugging Face folders in and out; new models
    rope        RoPE's frequencies in models for long contexts
    preflight   checks before anything large is allocated
    warm_start  the supervised start
    setup       how a run begins: its models, its problems, its folder

What a run leaves behind:

    files       atomic writes, the lock of a folder, logs
    checkpoint  saving and resuming
    report      statistics, samples.jsonl; runs as an HTML page
    show        the terminal
"""

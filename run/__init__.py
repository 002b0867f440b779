"""The code around the algorithm: none of it is needed to follow a step.

How a step gets its speed, memory and ranks:

    caches      the KV caches of sampling
    passes      training passes: micro-batches, common prefixes, logits in parts; supervised fits
    dist        device, dtype, ranks, FSDP2, random streams, signals, progress

What a run is made of:

    config      the settings as a command line; algorithms in files of their own
    pretrained  Hugging Face folders in and out; new models; the memory that a run needs
    setup       how a run begins: its problems and checks, its models, its warm start

What a run leaves behind:

    files       atomic writes, the lock of a folder, logs
    checkpoint  saving, resuming, taking a folder
    report      the terminal, statistics, samples.jsonl, runs as an HTML page
"""

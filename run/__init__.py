"""What a step calls, beside `model.py`, and what surrounds it:

    passes      micro-batches, rows with common prefixes once, supervised fits
    caches      the KV caches of sampling, and the drawing of tokens
    dist        the ranks: sums over them, their random streams
    report      a step's statistics; samples.jsonl; the terminal; runs as an HTML page

How a run begins, and what it leaves behind:

    device      device and dtype, compilation
    signals     a run that is asked to stop
    terminal    what is printed; progress
    config      the settings as a command line; algorithms in files of their own
    pretrained  Hugging Face folders in and out; new models; the memory that a run needs
    setup       its problems and checks, its models, its warm start
    files       atomic writes, the lock of a folder, logs
    checkpoint  saving, resuming, taking a folder
"""

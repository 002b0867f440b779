"""The code around the algorithm. Each module imports only modules above it:

    caches      KV caches of sampling: plain, for rows with common prefixes, with static shapes
    prefixes    common prefixes of rows are computed once in training passes
    dist        device, dtype, ranks, FSDP2, random streams, signals
    show        terminal output
    config      a dataclass as a command line; algorithms in files of their own
    batches     micro-batches, statistics, the check that sampler and trainer agree
    files       atomic writes, a lock; a run's folder and logs
    report      samples.jsonl, and runs as an HTML page
    preflight   checks before a run: the task, sizes, memory
    pretrained  Hugging Face folders; loads or creates models; heads
    checkpoint  saving and resuming
    warm_start  the supervised start
    setup       all models of a run; how a run begins
"""

"""The code around the algorithm. Each module imports only modules above it:

    caches      KV caches of sampling: plain, and with static shapes for a GPU
    machine     device, dtype, compilation, ranks, random streams, signals
    show        terminal output
    flags       a dataclass as a command line
    variants    algorithms in files of their own
    files       atomic writes, file locks
    shard       FSDP2
    sharing     prefixes that rows share are computed once
    batches     micro-batches, statistics, the check that sampler and trainer agree
    optimizer   optimizer step, supervised training
    samples     what samples.jsonl says of a group
    report      runs as an HTML page
    tensors     the tensors in a checkpoint, and their validation
    pretrained  reads and writes models in Hugging Face's layout
    preflight   checks before a run: the task, sizes, memory
    models      loads or creates models; heads for critics and reward models
    folder      a run's folder and logs
    checkpoint  saving and resuming
    warm_start  the supervised start
    agents      all models of a run; how a run begins
"""

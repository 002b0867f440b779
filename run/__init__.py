"""What surrounds the algorithm, a room each; a room uses those before it, never one after it:

    machine     device, dtype, compilation, ranks, random streams, signals
    show        what one sees in the terminal
    flags       a dataclass as a command line
    batches     rows into micro-batches, the optimizer's step, supervised fits
    files       written whole or not at all, and held by one process
    tensors     the tensors of a run by name, checked
    pretrained  Hugging Face's layout, in and out
    folder      the folder of a run: checkpoint, logs, resume
    start       the model that a run starts from, its warm start, the memory it takes
"""

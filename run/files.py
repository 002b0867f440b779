"""Files that are written whole or not at all."""
import os
from functools import partial
from pathlib import Path

from safetensors.torch import save_file

def write_whole(path, content):
    """Write a file beside `path`, then rename it: a crash leaves the old file whole. content: text,
    bytes, or a function that writes a path."""
    beside = path.with_name(path.name + ".tmp")
    if callable(content):
        content(beside)
    else:
        beside.write_bytes(content.encode() if isinstance(content, str) else content)
    with open(beside, "rb+") as f:
        os.fsync(f.fileno())
    os.replace(beside, path)

def write_tensors(path, tensors, metadata):
    """A safetensors file, whole or not at all. One metadata key: the order of several is random."""
    tensors = {n: t.cpu().contiguous() for n, t in tensors.items()}
    write_whole(Path(path), partial(save_file, tensors, metadata=metadata))

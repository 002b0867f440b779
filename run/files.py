"""Files that are written whole or not at all."""
import os
from pathlib import Path

from safetensors.torch import save_file

def write_whole(path, content):
    """Write a file beside `path`, then rename it: a crash leaves the old file whole. content: text,
    or a function that writes a path."""
    beside = path.with_name(path.name + ".tmp")
    beside.write_text(content) if isinstance(content, str) else content(beside)
    with open(beside, "rb+") as f:
        os.fsync(f.fileno())
    os.replace(beside, path)

def write_tensors(path, tensors, metadata):
    """A safetensors file, whole or not at all. One metadata key: the order of several is random."""
    tensors = {n: t.cpu().contiguous() for n, t in tensors.items()}
    write_whole(Path(path), lambda p: save_file(tensors, p, metadata=metadata))

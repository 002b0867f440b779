"""Models and tokenizers beside those of Hugging Face's libraries; skipped where there are none."""
import itertools
import json
import random
import re
import unicodedata

import pytest
import torch
from conftest import ROOT, flags, metrics, same, tiny_model

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
pytestmark = pytest.mark.slow
from safetensors.torch import load_file  # noqa: E402
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers  # noqa: E402
from tokenizers import models, processors, trainers  # noqa: E402

import grpo  # noqa: E402
from data.tokenizer import byte_encoding, decode, load_encoding  # noqa: E402
from grpo import sample  # noqa: E402
from model import Rows  # noqa: E402

from run import pretrained  # noqa: E402
from test_files import CASES, write_tokenizer  # noqa: E402

SHAPE = dict(vocab_size=320, hidden_size=48, intermediate_size=80, num_hidden_layers=3,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
             initializer_range=0.2, bos_token_id=None, eos_token_id=319)
LLAMA3 = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0,
              high_freq_factor=4.0, original_max_position_embeddings=64)
LINEAR = dict(rope_type="linear", factor=4.0)
GPT2 = dict(vocab_size=320, n_embd=48, n_layer=3, n_head=4, n_positions=256, initializer_range=0.2,
            bos_token_id=319, eos_token_id=319)
FAMILIES = {                    # the class of the config, and what is particular
    "gpt2": ("GPT2", GPT2),
    "gpt2, not tied": ("GPT2", GPT2 | dict(tie_word_embeddings=False)),
    "llama": ("Llama", SHAPE | dict(tie_word_embeddings=False)),
    "llama, tied": ("Llama", SHAPE | dict(tie_word_embeddings=True)),
    "llama 3": ("Llama", SHAPE | dict(rope_parameters=LLAMA3)),
    "llama, linear": ("Llama", SHAPE | dict(rope_parameters=LINEAR)),
    "mistral": ("Mistral", SHAPE | dict(head_dim=20, sliding_window=None)),
    "mistral, a window of its context": ("Mistral", SHAPE | dict(sliding_window=256)),
    "qwen2": ("Qwen2", SHAPE | dict(tie_word_embeddings=True)),
    "qwen3": ("Qwen3", SHAPE | dict(head_dim=16, tie_word_embeddings=False))}


def checkpoint(family, folder, **changes):
    """A small random model of a family, saved by transformers. Biases and norms are random too."""
    torch.manual_seed(0)
    kind, given = FAMILIES[family]
    config = getattr(transformers, f"{kind}Config")(**given | changes)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            if p.dim() == 1:
                p.add_(0.3 * torch.randn_like(p))
    theirs.save_pretrained(folder)
    return theirs


def read(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


@torch.no_grad()
def assert_same_logits(theirs, ours, vocabulary=320, begin=0):
    ids = torch.randint(0, vocabulary - 1, (2, 64))
    layout = Rows(ours, ids, None)
    layout.pos = layout.pos + begin
    want = theirs(ids, position_ids=layout.pos).logits

    torch.testing.assert_close(ours.head(ours(ids, layout=layout)), want, rtol=0, atol=1e-4)
    assert want.std() > 0.3
    return ids


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_continuations_are_those_of_transformers(family, tmp_path):
    theirs, ours = checkpoint(family, tmp_path), pretrained.load(tmp_path)
    ids = assert_same_logits(theirs, ours)
    prompts = [ids[0, :9].tolist(), ids[1, :30].tolist()]               # right padding, the cache
    batch = sample(ours, prompts, 1, [64, 64], 1.0, {10 ** 6})
    for row, on, prompt in zip(batch.ids, batch.mask, prompts):
        out = theirs.generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False,
                              eos_token_id=None, pad_token_id=0)
        assert row[on].tolist() == out[0, len(prompt):].tolist()


@pytest.mark.parametrize("family", ["llama", "llama 3", "llama, linear"])
def test_positions_far_out_are_those_of_transformers(family, tmp_path):
    """theta ** (-i / D) is not 1 / theta ** (i / D) in float32."""
    rope = FAMILIES[family][1].get("rope_parameters", {}) | dict(rope_theta=5e5)
    theirs = checkpoint(family, tmp_path, max_position_embeddings=8192, rope_parameters=rope)
    ours = pretrained.load(tmp_path)
    cos, _ = theirs.model.rotary_emb(torch.zeros(1), torch.arange(8192)[None])
    torch.testing.assert_close(ours.cos[:, 0], cos[0], rtol=0, atol=1e-6)
    assert_same_logits(theirs, ours, begin=8128)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_we_save_is_what_transformers_reads(family, tmp_path):
    theirs = checkpoint(family, tmp_path / "a")
    pretrained.save(pretrained.load(tmp_path / "a"), tmp_path / "b")
    a, b = (load_file(tmp_path / x / "model.safetensors") for x in "ab")
    assert same(a, b)
    ids = torch.randint(0, 319, (1, 20))
    with torch.no_grad():
        assert torch.equal(read(tmp_path / "b")(ids).logits, theirs(ids).logits)


def test_a_new_model_is_a_llama(tmp_path):
    ours = tiny_model()
    pretrained.config_json(ours)["eos_token_id"] = 256
    pretrained.save(ours, tmp_path, byte_encoding().files)
    assert_same_logits(read(tmp_path), ours, 257)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "47*58=\n47*50 é 漢 \x00\t"
    assert tokenizer(text)["input_ids"] == byte_encoding().encode_ordinary(text)
    assert tokenizer.decode(list(text.encode())) == text and tokenizer.eos_token_id == 256


QWEN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+")
TEXTS = ["between <think> and </think>.\n", "Janet's ducks lay 16 eggs per day, $2.50 each, 1,234!",
         "def f(x):\n    return x ** 2  # 4\n\n\n", "naïve – “déjà”, 漢字 かな 한국어 🙂👍🏽",
         "I'm you're we've it'd THEY'LL  two  spaces\t\ttabs \r\n windows"]


def tokenizer(style, folder, **config):
    """A byte-level BPE of a style, trained on a few texts and saved."""
    tk = Tokenizer(models.BPE(ignore_merges=style == "llama3"))
    words = style in ("gpt2", "smollm2")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    split = QWEN if style == "qwen2" else QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
    before = [] if words else [pre_tokenizers.Split(Regex(split), "isolated")]
    if style == "smollm2":
        before = [pre_tokenizers.Digits(individual_digits=True)]
    tk.pre_tokenizer = pre_tokenizers.Sequence([*before, level]) if before else level
    if style == "qwen2":
        tk.normalizer = normalizers.NFC()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    if style == "llama3":
        special = [f"<|{x}|>" for x in "begin_of_text end_of_text start_header_id "
                                       "end_header_id eot_id".split()]
    tk.decoder = decoders.ByteLevel()
    tk.train_from_iterator(TEXTS * 3, trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    if style == "qwen2":                                                    # as Qwen3 has
        tk.add_tokens([tokenizers.AddedToken(x) for x in ("<think>", "</think>")])
    if style == "llama3":
        tk.post_processor = processors.TemplateProcessing(
            single=f"{special[0]} $A", special_tokens=[(special[0], tk.token_to_id(special[0]))])
    folder.mkdir(exist_ok=True, parents=True)
    tk.save(str(folder / "tokenizer.json"))
    about = {"eos_token": "<|end_of_text|>" if style == "llama3" else "<|endoftext|>"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    (folder / "config.json").write_text("{}")
    return tk


def random_texts(n, seed=0):
    """Of Unicode 3.2, as the libraries' tables are of different years."""
    rng, plain = random.Random(seed), "abcdefgh XYZ  012 34\n\t\r'.,!?-_/*+=()<>#$%'s't're'LL"
    others = [chr(i) for i in [*range(0x80, 0x3000), *range(0x3000, 0x20000, 7)]
              if unicodedata.ucd_3_2_0.category(chr(i)) not in ("Cs", "Cn", "Co")]
    return ["".join(rng.choice(plain if rng.random() < 0.7 else others)
                    for _ in range(rng.randrange(1, 40))) for _ in range(n)]


@pytest.mark.parametrize("style", ["gpt2", "qwen2", "llama3", "smollm2"])
def test_ids_are_those_of_the_tokenizers_library(style, tmp_path):
    theirs, ours = tokenizer(style, tmp_path), load_encoding(tmp_path)
    for text in [*random_texts(2000), *TEXTS]:
        want = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode_ordinary(text) == want, repr(text)
        whole = unicodedata.normalize("NFC", text) if style == "qwen2" else text
        assert decode(ours, want) == whole == theirs.decode(want)
    assert ours.encode_prompt(TEXTS[0]) == theirs.encode(TEXTS[0]).ids     # with what opens a text


@pytest.mark.parametrize("name", CASES)
def test_recorded_ids_are_those_of_the_tokenizers_library(name, tmp_path):
    case, rng = CASES[name], random.Random(0)
    theirs = Tokenizer.from_file(str(write_tokenizer(case, tmp_path) / "tokenizer.json"))
    assert [theirs.encode(text).ids for text in case["texts"]] == case["ids"]
    ours = load_encoding(tmp_path)
    made = ["".join(rng.choices([*"abcdxyz "], k=rng.randrange(1, 20))) for _ in range(300)]
    for text in [*random_texts(300), *TEXTS, *made]:
        assert ours.encode_ordinary(text) == theirs.encode(text).ids, repr(text)


CHATML = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
          "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
# What else there is in some.
ODD = """{{- bos_token + strftime_now('%d %b %Y') }}{% set ns = namespace(n=0) %}
{% for m in messages %}
    {% if ns.n > 5 %}{% break %}{% endif %}
    {% set ns.n = ns.n + 1 %}
<|im_start|>{{ {'a<': 'é'} | tojson }} {{ [1] | tojson(indent=2) }} {{ tools }} {{ pad_token }}
    {%- if m.role == 'assistant' %}{% generation %}
{{ m.content }}<|im_end|>
    {%- endgeneration -%}{% else %}
  {{ m.content | trim }}<|im_end|>{% endif %}

{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant{% endif %}
"""
TEMPLATES = json.loads((ROOT / "tests" / "templates.json").read_text())
TEMPLATES = {x["model"]: x["template"] for x in TEMPLATES}
TEMPLATES |= {"ChatML": CHATML, "odd": ODD}
TOOLS = {"Qwen2.5-Instruct", "Qwen3"}       # where a reply is a tool's; elsewhere it is the user's
THOUGHT = "<think>\nOne more?\n</think>\n\nTwo more."


def chat_tokenizer(template, folder, **config):
    """A tokenizer that knows the tokens of a template; transformers has it without the template."""
    tk = tokenizer("qwen2", folder, tokenizer_class="PreTrainedTokenizerFast",
                   bos_token="<|endoftext|>", pad_token="<|im_end|>", **config)
    tk.add_special_tokens(sorted({*re.findall(r"<\|\w+\|>|<｜\S+?｜>", template), "<|endoftext|>"}))
    tk.save(str(folder / "tokenizer.json"))
    return tk


def applied(theirs, said, **thinking):
    return theirs.apply_chat_template(said, tokenize=True, add_generation_prompt=True,
                                      return_dict=False, **thinking)


def same_chat(theirs, ours, role, whole, system="", **thinking):
    """Whether prompts and replies have the ids of apply_chat_template; and if `whole`, whether all
    that the model has read is that conversation."""
    texts = [*TEXTS, *random_texts(20), " blank", "\n", " ", " a \n", "", "<tool_response>\n",
             '"{}"', "\u0301"]
    turns = [THOUGHT, *(x.strip() for x in [*TEXTS[1:], *random_texts(20, seed=1)])]
    for i, text in enumerate(texts):
        said = [{"role": "system", "content": system}] * bool(system)
        said += [{"role": "user", "content": text}]
        ids = ours.encode_prompt(text)
        assert ids == applied(theirs, said, **thinking), repr(text)
        for n, reply in ((i, text), (i // 2, texts[i // 2])):
            turn = turns[n % len(turns)]
            said += [{"role": "assistant", "content": turn}, {"role": role, "content": reply}]
            want = applied(theirs, said, **thinking)
            replied = [ours.end, *ours.encode_reply(reply)]
            assert want[-len(replied):] == replied, (turn, reply)
            ids += ours.encode_ordinary(turn) + replied
            assert (ids == want) == whole, (turn, reply)
    names = "".join(ours.special.keys() - ours.plain)
    control = {i for name, i in ours.special.items() if name not in ours.plain}
    sly, plain = ([t for t in ours.encode_reply(x) if t in control] for x in (names, "x"))
    assert sly == plain and names in decode(ours, ours.encode_reply(names))


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_those_of_apply_chat_template(name, tmp_path):
    """So are whole conversations, unless the template opens a turn that is to come in another way
    than one that is past."""
    template = TEMPLATES[name]
    tk = chat_tokenizer(template, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    chats = ("auto", "think", "no_think") if "enable_thinking" in template else ("auto",)
    for system, chat in itertools.product(("", "You <think>, <b>tersely</b>.\nVery."), chats):
        ours = load_encoding(tmp_path, chat, system)
        thinking = {} if chat == "auto" else {"enable_thinking": chat == "think"}
        whole = name not in ("odd", "DeepSeek-R1-Distill-Qwen") and chat != "no_think"
        same_chat(theirs, ours, "tool" if name in TOOLS else "user", whole, system, **thinking)
        assert tk.token_to_id(ours.frame.end) == ours.end and ours.end in ours.stop
    plain = load_encoding(tmp_path, "none")
    assert plain.encode_prompt("a") == tk.encode("a").ids
    assert plain.stop == {ours.special[theirs.eos_token]}


@pytest.mark.parametrize("template, files", [
    (CHATML, {}),
    ([dict(name="rag", template="{{ 1 }}"), dict(name="default", template=CHATML)], {}),
    ("{{ 1 }}", {"chat_template.jinja": CHATML}),
    (None, {"chat_template.jinja": CHATML})])
def test_where_a_template_may_stand_and_that_a_run_keeps_it(template, files, tmp_path):
    chat_tokenizer(CHATML, tmp_path / "a", chat_template=template)
    for name, text in files.items():
        (tmp_path / "a" / name).write_text(text)
    pretrained.save(tiny_model(), tmp_path / "b", load_encoding(tmp_path / "a").files)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "b")
    for place in "ab":
        same_chat(again, load_encoding(tmp_path / place), "user", True)


@pytest.mark.parametrize("family, style", [
    ("qwen2", "qwen2"), ("gpt2", "gpt2"), ("llama 3", "llama3"), ("qwen3", "qwen2")])
def test_in_and_out_again(family, style, tmp_path):
    """A vocabulary that is padded, as Qwen's is; --chat none is kept."""
    chat = {"chat_template": CHATML} if style == "qwen2" else {}
    tk = tokenizer(style, tmp_path / "model", **chat)
    size = tk.get_vocab_size() + 5
    length = "n_positions" if family == "gpt2" else "max_position_embeddings"
    checkpoint(family, tmp_path / "model", vocab_size=size, eos_token_id=1, **{length: 512})
    row = json.dumps({"question": "How many?", "answer": "2+2 = 4\n#### 4"}) + "\n"
    (rows := tmp_path / "rows.jsonl").write_text(row * 8)
    out = tmp_path / "x"
    settings = "--chat none --steps 2 --prompts 2 --group 4 --max_new 12 --lr 1e-3".split()
    given = dict(task="gsm8k", init=tmp_path / "model", train=rows, test=rows, out=out)
    grpo.main([*flags(given), *settings])
    assert "<|im_start|>" not in pretrained.encoding_of(grpo.Config(), out).frame.before
    ours = pretrained.load(out)
    assert_same_logits(read(out), ours, size)
    lines = metrics(out)
    assert [m["step"] for m in lines] == [0, 1, 2] and all(m["mismatch"] < 1e-4 for m in lines[1:])
    assert load_encoding(out).encode_prompt(TEXTS[1]) == tk.encode(TEXTS[1]).ids

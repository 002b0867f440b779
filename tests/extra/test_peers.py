"""Models and tokenizers beside those of Hugging Face's libraries; skipped where there are none."""
import itertools
import json
import random
import re
import unicodedata

import pytest
import torch
from conftest import ROOT, records

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
pytestmark = pytest.mark.slow
from safetensors.torch import load_file, save_file  # noqa: E402
from tokenizers import Regex, Tokenizer, decoders, models as tokenizer_models, normalizers, pre_tokenizers  # noqa: E402
from tokenizers import processors, trainers  # noqa: E402

import grpo  # noqa: E402
from data import UserError  # noqa: E402
from data.tokenizer import byte_encoding, decode, load_encoding  # noqa: E402
from grpo import sample  # noqa: E402
from run import passes, pretrained  # noqa: E402
from run.pretrained import encoding_of, frozen  # noqa: E402
from test_files import CASES, write_tokenizer  # noqa: E402

SHAPE = dict(vocab_size=320, hidden_size=48, intermediate_size=80, num_hidden_layers=3,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
             initializer_range=0.2, bos_token_id=None, eos_token_id=319)
LLAMA3 = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0,
              high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
GPT2 = dict(vocab_size=320, n_embd=48, n_layer=3, n_head=4, n_positions=256, initializer_range=0.2,
            bos_token_id=319, eos_token_id=319)
FAMILIES = {
    "gpt2": lambda: transformers.GPT2Config(**GPT2),
    "gpt2, not tied": lambda: transformers.GPT2Config(**GPT2, tie_word_embeddings=False),
    "llama": lambda: transformers.LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "llama, tied": lambda: transformers.LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "llama 3": lambda: transformers.LlamaConfig(**SHAPE, rope_parameters=LLAMA3),
    "llama, linear": lambda: transformers.LlamaConfig(**SHAPE, rope_parameters=dict(rope_type="linear", factor=4.0)),
    "llama, yarn": lambda: transformers.LlamaConfig(**SHAPE, rope_parameters=YARN | dict(rope_theta=5e5, truncate=False)),
    "llama, yarn's factor": lambda: transformers.LlamaConfig(**SHAPE, rope_parameters=YARN | dict(attention_factor=1.4, beta_fast=4)),
    "llama, yarn as DeepSeek's": lambda: transformers.LlamaConfig(
        **SHAPE, rope_theta=500.0, rope_scaling=dict(type="yarn", factor=40, original_max_position_embeddings=64, beta_fast=32,
                                                     beta_slow=1, mscale=1.0, mscale_all_dim=0.5)),
    "mistral": lambda: transformers.MistralConfig(**SHAPE, head_dim=20, sliding_window=None),
    "mistral, a window of its context": lambda: transformers.MistralConfig(**SHAPE, sliding_window=256),
    "qwen2, yarn": lambda: transformers.Qwen2Config(**SHAPE, rope_parameters=YARN),
    "qwen3, yarn": lambda: transformers.Qwen3Config(**SHAPE, head_dim=16, rope_parameters=YARN | dict(beta_slow=2)),
    "qwen2": lambda: transformers.Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=False),
}


def checkpoint(family, folder, seed=0, **how):
    """A small random model of a family, saved by transformers. Biases and norms are random too."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]()).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1:
                p.add_(0.3 * torch.randn_like(p))
    model.save_pretrained(folder, **how)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_continuations_are_those_of_transformers(family, tmp_path):
    theirs, ours = checkpoint(family, tmp_path), pretrained.load(tmp_path)
    ids = torch.randint(0, 319, (2, 90))                # more than an original context of 64
    with torch.no_grad():
        want, have = theirs(ids).logits, ours.head(ours(ids))
    assert want.std() > 0.3
    torch.testing.assert_close(have, want, rtol=0, atol=1e-4)
    prompts = [ids[0, :9].tolist(), ids[1, :30].tolist()]               # right padding, the cache
    batch = sample(ours, prompts, 1, [64, 64], 1.0, {10 ** 6})
    for row, prompt in enumerate(prompts):
        out = theirs.generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False,
                              eos_token_id=None, pad_token_id=0)[0, len(prompt):]
        assert batch.ids[row][batch.mask[row]].tolist() == out.tolist()


@pytest.mark.parametrize("family", ["llama", "llama 3", "llama, linear", "llama, yarn", "llama, yarn as DeepSeek's"])
def test_positions_far_out_are_those_of_transformers(family, tmp_path):
    """theta ** (-i / D) is not 1 / theta ** (i / D) in float32: at 8,192 positions the angles were
    1e-3 apart, and so were the logits."""
    config = FAMILIES[family]()
    config.max_position_embeddings = 8192
    config.rope_parameters = {**config.rope_parameters, "rope_theta": 5e5}
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    theirs.save_pretrained(tmp_path)
    ours = pretrained.load(tmp_path)
    if config.rope_parameters["rope_type"] in ("linear", "yarn"):
        assert torch.equal(torch.tensor(ours.cfg.rope_inv_freq), theirs.model.rotary_emb.inv_freq)
    cos, sin = theirs.model.rotary_emb(torch.zeros(1), torch.arange(8192)[None])
    torch.testing.assert_close(ours.cos[:, 0], cos[0], rtol=0, atol=1e-6)
    negated = torch.cat((-sin[0, :, :6], sin[0, :, 6:]), 1)         # ours, for the first of a pair
    torch.testing.assert_close(ours.sin[:, 0], negated, rtol=0, atol=1e-6)
    ids, pos = torch.randint(0, 319, (1, 64)), torch.arange(8128, 8192)[None]
    with torch.no_grad():
        far = theirs(ids, position_ids=pos).logits
        torch.testing.assert_close(ours.head(ours(ids, pos)), far, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_we_save_is_what_transformers_reads(family, tmp_path):
    theirs = checkpoint(family, tmp_path / "a")
    pretrained.save(pretrained.load(tmp_path / "a"), tmp_path / "b")
    a, b = (load_file(tmp_path / x / "model.safetensors") for x in "ab")
    assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b").eval()
    ids = torch.randint(0, 319, (1, 20))
    with torch.no_grad():
        assert torch.equal(again(ids).logits, theirs(ids).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_samples_and_trains(family, tmp_path):
    """The heads' norms of Qwen3 gave float32 to a bfloat16 cache."""
    checkpoint(family, tmp_path)
    model = pretrained.load(tmp_path)
    model.amp = torch.bfloat16
    batch = sample(frozen(model), [[1, 2, 3]], 4, [20], 1.0, {319}, torch.rand(4, 20).double())
    logp, _ = passes.token_logps(model, batch.ids, batch.mask, 1.0)
    assert (logp - batch.logp).abs().max() < passes.MISMATCH[torch.bfloat16][0]
    logp.sum().backward()


def test_a_new_model_is_a_llama(tmp_path):
    from conftest import tiny_model
    ours = tiny_model()
    pretrained.config_json(ours)["eos_token_id"] = 256
    pretrained.save(ours, tmp_path, byte_encoding().files)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.randint(0, 256, (1, 20))
    with torch.no_grad():
        torch.testing.assert_close(ours.head(ours(ids)), theirs(ids).logits, rtol=0, atol=1e-4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "47*58=\n47*50 é 漢 \x00\t"
    assert tokenizer(text)["input_ids"] == byte_encoding().encode_ordinary(text)
    assert tokenizer.decode(list(text.encode())) == text and tokenizer.eos_token_id == 256


def test_a_checkpoint_in_parts_and_in_bfloat16(tmp_path):
    theirs = checkpoint("qwen2", tmp_path / "whole")
    theirs.to(torch.bfloat16).save_pretrained(tmp_path / "parts", max_shard_size="40KB")
    assert (tmp_path / "parts" / "model.safetensors.index.json").exists()
    ours = pretrained.load(tmp_path / "parts")
    for p, q in zip(ours.parameters(), pretrained.load(tmp_path / "whole").parameters()):
        assert p.dtype == torch.float32 and torch.equal(p, q.bfloat16().float())
    pretrained.save(ours, tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")         # as it was trained
    assert all(x.dtype == torch.float32 for x in again.values())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype="auto")
    assert theirs.dtype == torch.float32
    (tmp_path / "parts" / "model-00002-of-00002.safetensors").unlink(missing_ok=True)
    for part in list((tmp_path / "parts").glob("model-*.safetensors"))[:1]:
        part.unlink()
    with pytest.raises(UserError, match="cannot read its tensors"):
        pretrained.load(tmp_path / "parts")


def test_the_first_gpt2_has_shorter_names_and_constants(tmp_path):
    theirs = checkpoint("gpt2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {n.removeprefix("transformer."): x for n, x in tensors.items()}
    tensors |= {"h.0.attn.bias": torch.ones(1, 1, 4, 4), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    save_file(tensors, tmp_path / "model.safetensors")
    ours, ids = pretrained.load(tmp_path), torch.randint(0, 319, (1, 20))
    with torch.no_grad():
        torch.testing.assert_close(ours.head(ours(ids)), theirs(ids).logits, rtol=0, atol=1e-4)


def test_what_is_not_this_model_is_refused(tmp_path):
    checkpoint("qwen2", tmp_path)
    whole = json.loads((tmp_path / "config.json").read_text())
    for change, why in ((dict(model_type="mamba"), "model_type 'mamba'"),
                        (dict(hidden_act="relu"), "hidden_act 'relu' is not supported"),
                        (dict(use_sliding_window=True), "use_sliding_window"),
                        (dict(rope_parameters=dict(rope_type="dynamic", factor=2.0)), "'dynamic'"),
                        (dict(quantization_config={"bits": 4}), "quantization_config"),
                        (dict(hidden_size=None), "hidden_size"),
                        (dict(num_attention_heads=0), "must be between 1"),
                        (dict(num_key_value_heads=-1), "must be between 1"),
                        (dict(intermediate_size=96), r"'model\.layers\.0\.mlp.*' has the shape"),
                        (dict(num_hidden_layers=2), r"another model: 'model\.layers\.2"),
                        (dict(num_hidden_layers=4), r"lack tensors of the model: 'model\.layers\.3")):
        (tmp_path / "config.json").write_text(json.dumps(whole | change))
        with pytest.raises(UserError, match=why):
            pretrained.load(tmp_path)


# ------------------------------------------------------------------------------------ tokenizers

QWEN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+")
STYLES = ("gpt2", "qwen2", "llama3", "smollm2")
TEXTS = ["between <think> and </think>.\n", "Janet's ducks lay 16 eggs per day. She'll eat three, $2.50 each, 1,234 in all!\n#### 18",
         "def f(x):\n    return x ** 2  # squares\n\n\n", "naïve café – “déjà vu”, 漢字 かな 한국어 🙂👍🏽",
         "I'm you're we've it'd THEY'LL  two  spaces\t\ttabs \r\n windows"]


def tokenizer(style, folder, **config):
    """A byte-level BPE of a style, trained on a few texts and saved."""
    tk = Tokenizer(tokenizer_models.BPE(ignore_merges=style == "llama3"))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=style in ("gpt2", "smollm2"))
    split = QWEN if style == "qwen2" else QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
    before = {"gpt2": [], "smollm2": [pre_tokenizers.Digits(individual_digits=True)]}.get(
        style, [pre_tokenizers.Split(Regex(split), "isolated")])
    tk.pre_tokenizer = pre_tokenizers.Sequence([*before, level]) if before else level
    if style == "qwen2":
        tk.normalizer = normalizers.NFC()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    plain = [tokenizers.AddedToken("<think>"), tokenizers.AddedToken("</think>")]   # as Qwen3 has
    if style == "llama3":
        special = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>",
                   "<|end_header_id|>", "<|eot_id|>"]
    tk.decoder = decoders.ByteLevel()
    tk.train_from_iterator(TEXTS * 3, trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    if style == "qwen2":
        tk.add_tokens(plain)
    if style == "llama3":
        begin = "<|begin_of_text|>"
        tk.post_processor = processors.Sequence([
            processors.ByteLevel(trim_offsets=False), processors.TemplateProcessing(
                single=f"{begin} $A", special_tokens=[(begin, tk.token_to_id(begin))])])
    folder.mkdir(exist_ok=True, parents=True)
    tk.save(str(folder / "tokenizer.json"))
    about = {"eos_token": "<|end_of_text|>" if style == "llama3" else "<|endoftext|>"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    (folder / "config.json").write_text("{}")
    return tk


def random_texts(n, seed=0):
    """Unicode of all kinds, letters, digits, blanks and marks more often."""
    r = random.Random(seed)
    plain = "abcdefgh XYZ  012 34\n\t\r'.,!?-_/*+=()<>#$%'s't're'LL"
    def char():
        if r.random() < 0.7:
            return r.choice(plain)
        while True:         # of Unicode 3.2: the libraries' tables are of different years
            c = chr(r.choice([r.randrange(0x80, 0x3000), r.randrange(0x3000, 0x20000)]))
            if unicodedata.ucd_3_2_0.category(c) not in ("Cs", "Cn", "Co"):
                return c
    return ["".join(char() for _ in range(r.randrange(1, 40))) for _ in range(n)]


@pytest.mark.parametrize("style", STYLES)
def test_ids_are_those_of_the_tokenizers_library(style, tmp_path):
    theirs, ours = tokenizer(style, tmp_path), load_encoding(tmp_path)
    for text in [*random_texts(2000), *TEXTS]:
        want = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode_ordinary(text) == want, repr(text)
        whole = unicodedata.normalize("NFC", text) if style == "qwen2" else text
        assert decode(ours, want) == whole == theirs.decode(want)
    assert ours.encode_prompt(TEXTS[0]) == theirs.encode(TEXTS[0]).ids     # with what opens a text


@pytest.mark.parametrize("pattern", [r"\p{L}+", r"[0-9]+|\s+(?!\S)", r"(?i:'s|'t)"])
def test_what_a_split_leaves_out_is_a_piece_too(pattern, tmp_path):
    """What lay between the matches was once lost."""
    theirs = tokenizer("qwen2", tmp_path)
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    theirs.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), level])
    theirs.save(str(tmp_path / "tokenizer.json"))
    ours = load_encoding(tmp_path)
    for text in [*random_texts(200), *TEXTS]:
        assert ours.encode_ordinary(text) == theirs.encode(text, add_special_tokens=False).ids, repr(text)


@pytest.mark.parametrize("name", CASES)
def test_recorded_ids_are_those_of_the_tokenizers_library(name, tmp_path):
    """What test_files.py compares with, where there is no such library; here on more texts too."""
    case = CASES[name]
    theirs = Tokenizer.from_file(str(write_tokenizer(case, tmp_path) / "tokenizer.json"))
    assert [theirs.encode(text).ids for text in case["texts"]] == case["ids"]
    ours, rng = load_encoding(tmp_path), random.Random(0)
    made = ["".join(rng.choices([*"abcdxyz "], k=rng.randrange(1, 20))) for _ in range(300)]
    for text in [*random_texts(300), *TEXTS, *made]:
        assert ours.encode_ordinary(text) == theirs.encode(text).ids, repr(text)


def random_merges(rng):
    """A case of few letters, whose words come in the way of each other: words of no merge, of several, and
    whose parts come later than they do."""
    words, pairs, unmade = [*"abc"[:rng.randrange(2, 4)]], [], []
    for _ in range(rng.randrange(1, 14)):
        a, b = rng.choices(words, k=2)
        word = a + b
        if word not in words and len(word) < 8:
            words.append(word)
            if rng.random() < 0.15:
                unmade.append(word)
                continue
            pairs.append([(a, b)])
            pairs[-1] += [(word[:i], word[i:]) for i in range(1, len(word)) if {word[:i], word[i:]} <= {*words}
                          and (a, b) != (word[:i], word[i:]) and rng.random() < 0.3]
    if rng.random() < 0.3:
        rng.shuffle(pairs)
    return dict(merges=[" ".join(pair) for same in pairs for pair in same], words=unmade, ignore_merges=rng.random() < 0.3,
                parts=[dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)])


def test_merges_at_random_are_those_of_the_tokenizers_library(tmp_path):
    """tiktoken joins any two tokens that make a token, and looks whole pieces up first."""
    rng, refused, unmade = random.Random(0), 0, 0
    for _ in range(300):
        case = random_merges(rng)
        theirs = Tokenizer.from_file(str(write_tokenizer(case, tmp_path) / "tokenizer.json"))
        try:
            ours = load_encoding(tmp_path)
        except UserError as e:
            assert case["ignore_merges"] and "which no merge joins" in str(e)
            refused += 1
            continue
        unmade += bool(ours.unmade)
        texts = [*map("".join, itertools.product("ab", repeat=5)), *("".join(rng.choices("abc ", k=20)) for _ in range(100))]
        for text in [*theirs.get_vocab(), *texts]:
            if text != "<end>":
                assert ours.encode_ordinary(text) == theirs.encode(text).ids, (case, text)
    assert refused > 20 and unmade > 100


def test_a_tokenizer_of_another_kind_is_refused(tmp_path):
    tokenizer("qwen2", tmp_path)
    whole = json.loads((tmp_path / "tokenizer.json").read_text())
    level = whole["pre_tokenizer"]["pretokenizers"][1]
    turned = whole["model"] | {"merges": whole["model"]["merges"][::-1]}
    for change, why in ((dict(model={"type": "Unigram", "vocab": []}), "not a byte-level BPE"),
                        (dict(pre_tokenizer={"type": "Metaspace"}), "not a byte-level BPE"),
                        (dict(pre_tokenizer=level | {"add_prefix_space": True}), "not a byte-level"),
                        (dict(normalizer={"type": "Lowercase"}), "Lowercase"),
                        (dict(model=turned), "order of its merges"),
                        (dict(pre_tokenizer={"type": "Sequence", "pretokenizers": []}), "cannot read"),
                        (dict(added_tokens=[dict(whole["added_tokens"][0], id=5)]), "have the same id"),
                        (dict(model={}), "cannot read its tokenizer")):
        (tmp_path / "tokenizer.json").write_text(json.dumps(whole | change))
        with pytest.raises(UserError, match=why):
            load_encoding(tmp_path)


CHATML = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
          "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
# What is in Llama 3.1's and 3.2's: what opens a text, a block of the system with the date of today,
# texts stripped. The templates themselves are under a license of their own, and were compared by hand.
DATED = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set told, messages = messages[0]['content'] | trim, messages[1:] %}
{%- else %}
    {%- set told = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{{- 'Today: ' + strftime_now('%d %b %Y') + '\\n\\n' }}
{{- told + '<|eot_id|>' }}
{%- for m in messages %}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
# What else there is in some: marked answers, a loop that is left, JSON, a namespace, its variables.
ODD = """{% set ns = namespace(n=0) %}
{% for m in messages %}
    {% if ns.n > 5 %}{% break %}{% endif %}
    {% set ns.n = ns.n + 1 %}
<|im_start|>{{ {'a<': 'é'} | tojson }} {{ [1] | tojson(indent=2) }} {{ tools }} {{ documents }} {{ pad_token }}
    {%- if m.role == 'assistant' %}{% generation %}
{{ m.content }}<|im_end|>
    {%- endgeneration -%}{% else %}
  {{ m.content }}<|im_end|>{% endif %}

{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant{% endif %}
"""
TEMPLATES = {x["model"]: x["template"] for x in json.loads((ROOT / "tests" / "templates.json").read_text())}
# Llama 3.2's kind: a tool has a role of another name, and its text is written as JSON.
JSON = DATED.replace("m.role", "(m.role if m.role != 'tool' else 'ipython')").replace(
    "m.content | trim", "(m.content | trim if m.role != 'tool' else m.content | tojson)")
TEMPLATES |= {"ChatML": CHATML, "dated": DATED, "odd": ODD, "JSON": JSON}
TOOLS = {"Qwen2.5-Instruct", "Qwen3"}       # where a reply is a tool's; elsewhere it is the user's


def chat_tokenizer(template, folder, **config):
    """A tokenizer that knows the tokens of a template; transformers has it in `folder`, without the
    template."""
    tk = tokenizer("llama3" if "start_header" in str(template) else "qwen2", folder,
                   tokenizer_class="PreTrainedTokenizerFast", bos_token="<|endoftext|>", pad_token="<|im_end|>", **config)
    tk.add_special_tokens(sorted({*re.findall(r"<\|\w+\|>|<｜\S+?｜>", str(template)), "<|endoftext|>"}))
    tk.save(str(folder / "tokenizer.json"))
    return tk


def same_chat(theirs, ours, system="", **thinking):
    """Whether prompts have the ids of apply_chat_template, which has the tokens of a chat in a text
    too; here there are none."""
    for text in [*TEXTS, *random_texts(40), " blank", "\n", "", " a \n"]:
        said = [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": text}]
        want = theirs.apply_chat_template(said, tokenize=True, add_generation_prompt=True, return_dict=False, **thinking)
        assert ours.encode_prompt(text) == want, repr(text)


THOUGHT = "<think>\nOne more?\n</think>\n\nTwo more."


def same_turns(theirs, ours, role, whole, system="", **thinking):
    """Whether a reply, with the end of the turn before it, has the ids with which apply_chat_template ends
    the conversation up to there; and if `whole`, whether all that the model has read is that conversation."""
    texts = [*TEXTS, *random_texts(20), " blank", "\n", " ", " a \n", "", "<tool_response>\n", '"{}"', "\u0301"]
    turns = [THOUGHT, *(x.strip() for x in [*TEXTS[1:], *random_texts(20, seed=1)])]
    for i, text in enumerate(texts):
        said = [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": text}]
        ids = ours.encode_prompt(text)
        for turn, reply in ((turns[i % len(turns)], text), (turns[i // 2 % len(turns)], texts[i // 2])):
            said += [{"role": "assistant", "content": turn}, {"role": role, "content": reply}]
            want = theirs.apply_chat_template(said, tokenize=True, add_generation_prompt=True, return_dict=False, **thinking)
            replied = [ours.end, *ours.encode_reply(reply)]
            assert want[-len(replied):] == replied, (turn, reply)
            ids += ours.encode_ordinary(turn) + replied
            assert (ids == want) == whole, (turn, reply)
    names = "".join(ours.special.keys() - ours.plain)
    sly, plain = ours.encode_reply(names), ours.encode_reply("x")
    control = {i for name, i in ours.special.items() if name not in ours.plain}
    assert [t for t in sly if t in control] == [t for t in plain if t in control]
    assert names in decode(ours, sly)


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_those_of_apply_chat_template(name, tmp_path):
    """Of real templates, beside their sources in templates.json, and of made ones. So are replies, and whole
    conversations unless the template opens a turn that is to come in another way than one that is past: the
    odd one, DeepSeek-R1's, which thinks or does not, and Qwen3's if it does not."""
    template = TEMPLATES[name]
    tk = chat_tokenizer(template, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for system in ("", "You <think>, <b>tersely</b>.\nVery."):
        for chat in ("auto", "think", "no_think") if "enable_thinking" in template else ("auto",):
            ours = load_encoding(tmp_path, chat, system)
            thinking = {} if chat == "auto" else {"enable_thinking": chat == "think"}
            same_chat(theirs, ours, system, **thinking)
            whole = name not in ("odd", "DeepSeek-R1-Distill-Qwen") and chat != "no_think"
            same_turns(theirs, ours, "tool" if name in TOOLS else "user", whole, system, **thinking)
    ours = load_encoding(tmp_path)
    answer = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bcd"}]
    told = theirs.apply_chat_template(answer, tokenize=False)
    assert told[told.rindex("bcd") + 3:].startswith(ours.frame.end) and tk.token_to_id(ours.frame.end) in ours.stop
    plain = load_encoding(tmp_path, "none")
    assert plain.encode_prompt("a") == tk.encode("a").ids and plain.stop == {ours.special[theirs.eos_token]}


@pytest.mark.parametrize("template, files", [
    (CHATML, {}),
    ([dict(name="rag", template="{{ 1 }}"), dict(name="default", template=CHATML)], {}),
    ("{{ 1 }}", {"chat_template.jinja": CHATML}),
    (None, {"chat_template.jinja": CHATML, "additional_chat_templates/rag.jinja": "{{ 1 }}"})])
def test_where_a_template_may_stand_and_that_a_run_keeps_it(template, files, tmp_path):
    """As text or as one of several, in tokenizer_config.json or beside it; and in what is written."""
    chat_tokenizer(CHATML, tmp_path / "a", chat_template=template)
    for name, text in files.items():
        (tmp_path / "a" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "a" / name).write_text(text)
    checkpoint("qwen2", tmp_path / "a")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path / "a"), load_encoding(tmp_path / "a")
    same_chat(theirs, ours)
    pretrained.save(pretrained.load(tmp_path / "a"), tmp_path / "b", load_encoding(tmp_path / "a").files)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "b")
    assert again.chat_template == theirs.chat_template
    assert load_encoding(tmp_path / "b").frame == ours.frame == load_encoding(tmp_path / "a").frame


def test_older_files_name_tokens_apart(tmp_path):
    tk = chat_tokenizer(DATED, tmp_path, chat_template="{{ unk_token }}{{ eos_token }}|" + DATED)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(
        {"unk_token": {"content": "<|eot_id|>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}}))
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), load_encoding(tmp_path)
    same_chat(theirs, ours)
    assert ours.encode_prompt("a")[0] == tk.token_to_id("<|eot_id|>")


def test_every_file_may_name_a_stop_token(tmp_path):
    """Base and instruct models differ: one name is not enough."""
    tk = tokenizer("qwen2", tmp_path)
    end = tk.token_to_id("<|im_end|>")
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": end}))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [301, 302]}')
    assert load_encoding(tmp_path).stop == {end, 301, 302, tk.token_to_id("<|endoftext|>")}


def test_a_tokenizer_without_all_bytes_drops_their_characters(tmp_path):
    """SmolLM2's has not all."""
    tokenizer("qwen2", tmp_path)
    whole = json.loads((tmp_path / "tokenizer.json").read_text())
    gone = "\u00f0"                                      # the letter of byte 0xf0
    vocab = {t: i for t, i in whole["model"]["vocab"].items() if gone not in t}
    merges = [m for m in whole["model"]["merges"] if gone not in "".join(m)]
    whole["model"] |= {"vocab": vocab, "merges": merges}
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    ours = load_encoding(tmp_path)
    assert ours.encode_prompt("a \U0001f642b") == ours.encode_prompt("a b")


# ------------------------------------------------------------------------------------- whole runs

@pytest.mark.parametrize("family, style, task", [
    ("qwen2", "qwen2", "countdown"), ("gpt2", "gpt2", "countdown"), ("llama 3", "llama3", "gsm8k"),
    ("qwen3", "qwen2", "gsm8k")])
def test_in_and_out_again(family, style, task, tmp_path, capsys):
    tk = tokenizer(style, tmp_path / "model", **({"chat_template": CHATML} if style == "qwen2" else {}))
    size = tk.get_vocab_size() + 5                      # padded, as Qwen's is
    config = FAMILIES[family]()
    config.vocab_size = size
    setattr(config, "n_positions" if family == "gpt2" else "max_position_embeddings", 512)
    config.eos_token_id = 1
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "How many?", "answer": "2+2 = 4\n#### 4"}) + "\n")
    rows.write_text(rows.read_text() * 8)
    files = ["--train", str(rows), "--test", str(rows)] if task == "gsm8k" else ["--difficulty", "2"]
    flags = ["--task", task, "--init", str(tmp_path / "model"), *files, "--chat", "none",
             "--steps", "2", "--prompts", "2", "--group", "4", "--max_new", "12",
             "--lr", "1e-3", "--out", str(tmp_path / "x")]
    monkey = pytest.MonkeyPatch()
    if task == "countdown":                             # two problems are evaluation enough
        import data.countdown as countdown
        real = countdown.problems
        monkey.setattr(countdown, "problems", lambda difficulty=2: (real(difficulty)[0], real(difficulty)[1][:2]))
    grpo.main(flags)
    out = tmp_path / "x"
    assert f"--task {task} --init {out} --ask QUESTION" in capsys.readouterr().out
    grpo.main([*flags[:2], "--init", str(out), *files, "--steps", "0", "--max_new", "2",
               "--prompts", "2", "--out", str(tmp_path / "y")])
    assert encoding_of(grpo.Config(), tmp_path / "y").frame == encoding_of(grpo.Config(), out).frame
    assert "<|im_start|>" not in encoding_of(grpo.Config(), tmp_path / "y").frame.before
    monkey.undo()
    with pytest.raises(SystemExit):
        grpo.main([*flags, "--out", str(tmp_path / "model")])
    assert "--init is in --out" in capsys.readouterr().err
    ours = pretrained.load(out)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    ids = torch.randint(0, size, (1, 30))
    with torch.no_grad():
        torch.testing.assert_close(ours.head(ours(ids)), theirs(ids).logits, rtol=0, atol=1e-4)
    lines = records(out / "metrics.jsonl")
    assert [m["step"] for m in lines] == [0, 1, 2] and all(m["mismatch"] < 1e-4 for m in lines[1:])
    tokenizer_out = transformers.AutoTokenizer.from_pretrained(out)
    want = tk.encode(TEXTS[0], add_special_tokens=False).ids
    assert tokenizer_out(TEXTS[0], add_special_tokens=False)["input_ids"] == want
    assert load_encoding(out).encode_ordinary(TEXTS[0]) == want

"""Tokenizers as a `tiktoken.Encoding`: the bytes, or a checkpoint's own tokenizer.json."""
import bisect
import codecs
import dataclasses
import itertools
import json
import re
import unicodedata
from pathlib import Path

import tiktoken

from data import Fault, read_json
from data.chat import Frame, frame_of

END = "<|endoftext|>"
BYTES = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))     # printable ones
BYTES += [b for b in range(256) if b not in BYTES]
LETTERS = dict(zip(BYTES, map(chr, [*BYTES[:188], *range(256, 324)])))   # GPT-2's letter of a byte
BYTE_OF = {letter: byte for byte, letter in LETTERS.items()}
GPT2_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGITS_SPLIT = GPT2_SPLIT.replace(r" ?\p{N}+", r"\p{N}").replace(r"(?!\S)", r"(?![^\s\p{N}])")
FRAME = "chat_frame.json"       # in a run's folder: the frame of its prompts
FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja",
         "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", FRAME)
MORE = "additional_chat_templates"


def split_at(marks, text):
    """The pieces of a text, among them the `marks` in it."""
    pattern = "|".join(map(re.escape, sorted(marks, key=len, reverse=True)))
    return re.split(f"({pattern})", text) if marks else [text]


def composed(text):
    """A text's NFC. Its combining characters are put in their order beforehand: `normalize` alone
    sorts them in quadratic time, 8 seconds for 100,000 of them."""
    if unicodedata.is_normalized("NFC", text):
        return text
    apart = "".join(unicodedata.normalize("NFD", c) for c in text)
    runs = (run for _, run in itertools.groupby(apart, lambda c: unicodedata.combining(c) > 0))
    ordered = (sorted(run, key=unicodedata.combining) for run in runs)
    return unicodedata.normalize("NFC", "".join(itertools.chain(*ordered)))


class Encoding(tiktoken.Encoding):
    """tiktoken's, with what a checkpoint says of its use.

    stop: the ids that end a completion, of which `end` is the first, the one to teach; frame: the
    Frame of a prompt; hidden: ids that are no text; plain: names of special tokens that are found
    in any text; files: by name, what belongs beside the weights.
    """

    def __init__(self, name, split, ranks, special, hidden, stop, files, frame=Frame(), nfc=False,
                 plain=()):
        super().__init__(name, pat_str=split, mergeable_ranks=ranks, special_tokens=special)
        self.end, self.stop, self.files, self.frame = stop[0], frozenset(stop), files, frame
        self.nfc, self.special, self.known = nfc, special, {*ranks.values(), *special.values()}
        self.text, self.plain = self.known - {*hidden, *stop}, plain
        self.missing = {b for b in range(256) if bytes([b]) not in ranks}

    def encode_ordinary(self, text):
        """Ids of a text, in which only `plain` tokens have a meaning of their own."""
        if self.missing:            # a tokenizer that lacks some bytes drops their characters
            text = text.encode("utf-8", "replace").decode()     # a lone surrogate has no bytes
            text = "".join(c for c in text if self.missing.isdisjoint(c.encode()))
        ids = []
        for piece in split_at(self.plain, text):
            piece = composed(piece) if self.nfc else piece
            known = piece in self.plain
            ids += [self.special[piece]] if known else super().encode_ordinary(piece)
        return ids

    def encode_prompt(self, text):
        """Ids of a prompt in its frame. Special tokens count in the frame, not in the text."""
        text = text.strip() if self.frame.strips else text
        before, after = ([self.special.get(piece, piece) for piece in split_at(self.special, x)]
                         for x in (self.frame.before, self.frame.after))
        ids = []
        for kind, pieces in itertools.groupby([*before, text, *after], type):
            ids += pieces if kind is int else self.encode_ordinary("".join(pieces))
        if not ids:
            raise Fault("an empty prompt: there is nothing to sample from")
        return ids

    def token_bytes(self, token):
        """The bytes of a token's text: none for a special one, or one that only pads the model's
        vocabulary."""
        return self.decode_single_token_bytes(token) if token in self.text else b""


def byte_encoding():
    """Ids 0-255 for the bytes and 256 for END: no download."""
    level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False)
    end = dict(id=256, content=END, single_word=False, lstrip=False, rstrip=False, normalized=False,
               special=True)
    model = dict(type="BPE", vocab={LETTERS[b]: b for b in range(256)}, merges=[])
    files = {"tokenizer.json": dict(version="1.0", added_tokens=[end], normalizer=None,
                                    pre_tokenizer=level, decoder=level, model=model),
             "tokenizer_config.json": dict(tokenizer_class="PreTrainedTokenizerFast",
                                           eos_token=END)}
    files = {name: json.dumps(x).encode() for name, x in files.items()}
    return Encoding("bytes", r"[\s\S]", {bytes([i]): i for i in range(256)}, {END: 256}, [], [256],
                    files)


def load_encoding(folder, chat="auto", system="", thinking="auto"):
    """The tokenizer of a checkpoint's folder; raises Fault if it is not a byte-level BPE. `chat`,
    `system`, `thinking`: how prompts are framed, as `chosen_frame` has it."""
    folder = Path(folder)
    names = (*FILES, *(f"{MORE}/{path.name}" for path in (folder / MORE).glob("*.jinja")))
    files = {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
    if "tokenizer.json" not in files:
        raise Fault(f"no model in {folder}: there is no tokenizer.json")
    try:
        hf, about, *others = (read_json(files.get(name, b"{}"), name) for name in FILES[:3])
        others.append(read_json((folder / "config.json").read_bytes(), "config.json"))
        special = {t["content"]: t["id"] for t in hf["added_tokens"]}
        ranks, split, nfc = byte_pairs(hf, special)
        frame = chosen_frame(files, about, hf, special, (chat, system, thinking))
        if frame.chat:
            files[FRAME] = json.dumps(dataclasses.asdict(frame)).encode()
        hidden = [t["id"] for t in hf["added_tokens"] if t["special"]]
        plain = [t["content"] for t in hf["added_tokens"] if not t["special"]]
        for t in hf["added_tokens"]:
            if t["content"] in plain or t["content"] in frame.before + frame.after:
                refuse(t, ("lstrip", "rstrip", "single_word"), f"its token {t['content']!r}")
        stop = stop_tokens(about, others, special, frame.end)
        return Encoding(str(folder), split, ranks, special, hidden, stop, files, frame, nfc, plain)
    except Fault as e:
        raise Fault(f"{folder}: {e}") from e
    except (OSError, LookupError, TypeError, ValueError, AttributeError) as e:
        raise Fault(f"{folder}: cannot read its tokenizer ({e.__class__.__name__}: {e})") from e


def chosen_frame(files, about, hf, special, asked):
    """The Frame of --chat, --system and --thinking. Where they are "auto" or "", they are as in the
    run that left its frame among the folder's `files`; if all are, it is that frame itself."""
    kept = Frame(**read_json(files[FRAME], FRAME)) if FRAME in files else Frame("auto")
    was = kept.chat, kept.system, kept.thinking
    asked = tuple(old if x in ("auto", "") else x for x, old in zip(asked, was))
    if asked == was and FRAME in files:
        return kept
    chat, *said = asked
    template = None if chat == "none" else find_template(files, about)
    if template is None:
        if said != ["", "auto"]:
            raise Fault("--system and --thinking need a chat template, and there is none")
        return Frame("none" if chat == "none" else "", before=opening(hf, special))
    if "added_tokens_decoder" not in about:         # as older files have it
        about = about | read_json(files.get("special_tokens_map.json", b"{}"), FILES[4])
    tokens = {name: x["content"] if isinstance(x, dict) else x for name, x in about.items()
              if name.endswith("_token") and isinstance(x, str | dict)}
    special = [t["content"] for t in hf["added_tokens"] if t["special"]]
    return frame_of(template, tokens, special, *said)


def find_template(files, about):
    """The chat template among a folder's files, of several the default; None if there is none."""
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"].decode()
    found = about.get("chat_template")
    if isinstance(found, list):
        found = {x["name"]: x["template"] for x in found}.get("default", "")
    if found == "" or not isinstance(found, str | None):
        raise Fault("its chat template is no text, or it has several and none is the default")
    return found


def stop_tokens(about, others, special, end):
    """The ids that end a completion: the end of a chat's turn first, then what a
    tokenizer_config.json and others say."""
    said = about.get("eos_token")
    stop = [special.get(end), special.get(said["content"] if isinstance(said, dict) else said)]
    for ends in (other.get("eos_token_id") for other in others):
        stop += ends if isinstance(ends, list) else [ends]
    if not (stop := [x for x in stop if x is not None]):
        raise Fault("no file names a token that ends a completion")
    if wrong := [x for x in stop if type(x) is not int or x < 0]:
        raise Fault(f"eos_token_id {wrong[0]!r} is no token")
    return stop


def byte_pairs(hf, special):
    """Of a tokenizer.json: the ids by the bytes of the token, the pattern that splits a text, and
    whether it is normalised to NFC. The ids must rank as the merges do: tiktoken merges by id."""
    model, pre, normalizer = hf["model"], hf["pre_tokenizer"] or {}, hf.get("normalizer")
    parts = pre.get("pretokenizers", [pre])
    kinds, *_, level = [p.get("type") for p in parts], parts[-1]
    regex = level.get("use_regex", True)
    if model["type"] != "BPE" or kinds[-1] != "ByteLevel" or level.get("add_prefix_space"):
        raise Fault("its tokenizer is not a byte-level BPE")
    if kinds == ["ByteLevel"]:
        split = GPT2_SPLIT if regex else r"[\s\S]+"
    elif kinds == ["Digits", "ByteLevel"] and regex and parts[0]["individual_digits"]:
        split = DIGITS_SPLIT
    elif kinds == ["Split", "ByteLevel"] and not regex and parts[0]["behavior"] == "Isolated":
        split = parts[0]["pattern"]["Regex"]        # what lies between its matches is a piece too
        if may_be_empty(split):
            raise Fault(f"its tokenizer splits a text by matches of no length: {split!r}")
        split = rf"(?:{split})|(?:(?!{split})[\s\S])+"
    else:
        raise Fault(f"its tokenizer splits a text in a way that is not supported: {kinds}")
    if normalizer is not None and normalizer["type"] != "NFC":
        raise Fault(f"its tokenizer has a normalizer that is not supported: {normalizer['type']}")
    refuse(model, ("dropout", "end_of_word_suffix", "continuing_subword_prefix"), "its tokenizer")
    refuse(parts[0], ("invert",), "its tokenizer's Split")
    vocab = model["vocab"]
    merged = [vocab["".join(m.split(" ") if isinstance(m, str) else m)] for m in model["merges"]]
    if merged != sorted(merged):
        raise Fault("the ids of its tokenizer are not in the order of its merges")
    ranks = {bytes(map(BYTE_OF.__getitem__, token)): i for token, i in vocab.items()
             if token not in special}
    ids = {*ranks.values(), *special.values()}
    if not all(type(i) is int and 0 <= i < 2 ** 31 for i in ids):
        raise Fault("the ids of its tokenizer are not all integers of 0 or more")
    if len(ids) < len(ranks) + len(special):
        raise Fault("its tokenizer has two tokens of one id")
    return ranks, split, normalizer is not None


def may_be_empty(pattern):
    """Whether a pattern matches nothing at all between two characters; tiktoken would panic."""
    ranks, any_ = {bytes([i]): i for i in range(256)}, r"[\s\S]"
    empty = tiktoken.Encoding("empty", pat_str=f"{any_}(?:{pattern})(?<!{any_}{any_}){any_}",
                              mergeable_ranks=ranks, special_tokens={})
    text = "".join(map(chr, range(9, 256))) + "ab 12  \n\n'' A"
    return any(empty.encode_ordinary(a + b) for a, b in itertools.pairwise(text))


def refuse(about, keys, whose):
    """Raise Fault if one of these settings, which would change the ids of a text, is not off."""
    for key in keys:
        if about.get(key):
            raise Fault(f"{whose} has {key} {about[key]!r}, which is not supported")


def opening(hf, special):
    """The special tokens that a tokenizer.json puts before every text, by name."""
    post, opened = hf.get("post_processor") or {"type": "ByteLevel"}, ""
    for part in post.get("processors", [post]):
        if part["type"] == "TemplateProcessing":
            before = [*itertools.takewhile(lambda x: "SpecialToken" in x, part["single"])]
            names = [x["SpecialToken"]["id"] for x in before]
            if len(part["single"]) > len(names) + 1 or not special.keys() >= {*names}:
                raise Fault("its post_processor puts a token after a text, or one it does not know")
            opened += "".join(names)
        elif part["type"] != "ByteLevel":
            raise Fault(f"its post_processor {part['type']} is not supported")
    return opened


def decode(encoding, ids):
    """The text of a completion, without special tokens."""
    return b"".join(map(encoding.token_bytes, ids)).decode("utf-8", "replace")


def pieces(encoding, ids):
    """The text of each token of a completion; a character that several make up is the last one's.
    They join to what `decode` gives."""
    decoder, last = codecs.getincrementaldecoder("utf-8")("replace"), len(ids) - 1
    return [decoder.decode(encoding.token_bytes(t), i == last) for i, t in enumerate(ids)]


def step_tokens(encoding, ids, ends):
    """Which token of `ids` closes each step, for `ends` in characters of their text."""
    done = list(itertools.accumulate(map(len, pieces(encoding, ids))))  # characters after each
    return [min(bisect.bisect_left(done, end), len(ids) - 1) for end in ends]

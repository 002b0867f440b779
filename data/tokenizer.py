"""Tokenizers as a `tiktoken.Encoding`: bytes, or the tokenizer.json of a checkpoint."""
import bisect
import codecs
import dataclasses
import itertools
import json
import re
import unicodedata
from pathlib import Path

import regex        # a requirement of tiktoken; Python's `re` has no \p{L}
import tiktoken

from data import UserError, fetched, read_json
from data.chat import BARE, THINKING, Frame, frame_of

END = "<|endoftext|>"
FRAME = "chat_frame.json"       # in a run's folder: the text around its prompts
FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja",
         "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", FRAME)
NOT_BYTE_LEVEL = ("its tokenizer is not a byte-level BPE without a prefix space, as of GPT-2, "
                  "Llama 3 or Qwen; SentencePiece, as of Llama 2 and Mistral 7B, is not supported")
BYTES = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))     # printable bytes
BYTES += [b for b in range(256) if b not in BYTES]
LETTERS = dict(zip(BYTES, map(chr, [*BYTES[:188], *range(256, 324)])))   # GPT-2's letter of a byte
BYTE_OF = {letter: byte for byte, letter in LETTERS.items()}
GPT2_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

def split_at(marks, text):
    """The pieces of a text split at `marks`, longest first, and these."""
    pattern = "|".join(map(re.escape, sorted(marks, key=len, reverse=True)))
    return re.split(f"({pattern})", text) if marks else [text]

class Encoding(tiktoken.Encoding):
    """tiktoken's Encoding, plus what else a checkpoint's files specify.

    stop: the ids that end a completion; `end`, the first of them, is the one taught in training.
    files: those to save beside the weights, name to contents. plain: names of added tokens that are
    recognised in any text. before: patterns that split a text before `split` does. unmade: the ids
    of tokens that no text has, by their bytes. ends: ids that end a text, even if not special.
    """

    def __init__(self, name, split, ranks, special, stop, files, frame=Frame(), nfc=False,
                 plain=(), before=(), unmade={}, ends=()):
        super().__init__(name, pat_str=split, mergeable_ranks=ranks, special_tokens=special)
        self.end, self.stop, self.files, self.frame = stop[0], frozenset(stop), files, frame
        self.nfc, self.special, self.before = nfc, special, before
        self.unmade = {i: token for token, i in unmade.items()}
        self.known = {*ranks.values(), *special.values(), *self.unmade}
        self.plain = plain
        control = {i for name, i in special.items() if name not in plain}
        self.silent = self.stop & (control | {*ends})
        self.missing = {b for b in range(256) if bytes([b]) not in ranks}

    def encode_ordinary(self, text):
        """Ids of a text; of added tokens only `plain` ones are recognised."""
        ids = []
        for piece in split_at(self.plain, text):
            if piece in self.plain:
                ids.append(self.special[piece])
                continue
            piece = unicodedata.normalize("NFC", piece) if self.nfc else piece
            for part in cut(piece, self.before):
                ids += self.encode_part(part)
        return ids

    def encode_part(self, text):
        """Ids of a text without added tokens. Bytes that the tokenizer lacks are dropped from the
        pieces into which it splits the text."""
        if self.missing.isdisjoint(text.encode("utf-8", "replace")):
            return super().encode_ordinary(text)
        ids = []
        for piece in cut(text, [regex.compile(self._pat_str)]):
            known = bytes(b for b in piece.encode("utf-8", "replace") if b not in self.missing)
            ids += self._encode_single_piece(known) if known else []
        return ids

    def encode_prompt(self, text):
        """Ids of a prompt in its frame."""
        ids = self.encode_framed(self.frame.before, text, self.frame.after)
        if not ids:
            raise UserError("the prompt is empty: there is nothing to sample from")
        return ids

    def encode_reply(self, text):
        """Ids of a reply after a stop token, as a message of the chat template, if there is one."""
        before, after = self.frame.reply_before, self.frame.reply_after
        if self.frame.chat not in ("", "none") and not before + after:
            raise UserError(f"{self.name}: its chat template has no place for a reply{BARE}")
        return self.encode_framed(before, text, after)

    def encode_framed(self, before, text, after):
        """Ids of a text between two others; special tokens are recognised in those alone."""
        text = text.strip() if self.frame.strips else text
        before, after = ([self.special.get(piece, piece) for piece in split_at(self.special, x)]
                         for x in (before, after))
        ids = []
        for kind, pieces in itertools.groupby([*before, text, *after], type):
            ids += pieces if kind is int else self.encode_ordinary("".join(pieces))
        return ids

    def encode_demonstration(self, text):
        """Ids of what the policy is to say, special tokens included, and the end token."""
        return self.encode_framed(text, "", "") + [self.end]

    def token_bytes(self, token):
        """The bytes of a token's text, of a special token its name; of one that ends a completion,
        or only pads the model's vocabulary, none."""
        if token in self.silent or token not in self.known:
            return b""
        return self.unmade.get(token) or self.decode_single_token_bytes(token)

def byte_encoding():
    """Ids 0-255 for the bytes and 256 for END; needs no download."""
    level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False)
    end = dict(id=256, content=END, single_word=False, lstrip=False, rstrip=False, normalized=False,
               special=True)
    model = dict(type="BPE", vocab={LETTERS[b]: b for b in range(256)}, merges=[])
    files = {"tokenizer.json": dict(version="1.0", added_tokens=[end], normalizer=None,
                                    pre_tokenizer=level, decoder=level, model=model),
             "tokenizer_config.json": dict(tokenizer_class="PreTrainedTokenizerFast",
                                           eos_token=END)}
    files = {name: json.dumps(x).encode() for name, x in files.items()}
    letters = {bytes([i]): i for i in range(256)}
    return Encoding("bytes", r"[\s\S]", letters, {END: 256}, [256], files)

def load_encoding(folder, chat="auto", system=""):
    """The tokenizer in a folder, with the frame for `chat` and `system`; UserError unless it
    is a byte-level BPE."""
    folder = Path(folder)
    files = {x: fetched(folder / x).read_bytes() for x in FILES if (folder / x).is_file()}
    if "tokenizer.json" not in files:
        raise UserError(f"no tokenizer.json in {folder}: transformers' AutoTokenizer writes one, "
                        f"by save_pretrained")
    try:
        hf, about, *others = (read_json(files.get(name, b"{}"), name) for name in FILES[:3])
        others.append(read_json(fetched(folder / "config.json").read_bytes(), "config.json"))
        special = {t["content"]: t["id"] for t in hf["added_tokens"]}
        bpe = read_bpe(hf, special)
        frame = chosen_frame(files, about, hf, special, (chat, system))
        if frame.chat:
            files[FRAME] = json.dumps(dataclasses.asdict(frame)).encode()
        plain = [t["content"] for t in hf["added_tokens"] if not t["special"]]
        shown = frame.before + frame.after + frame.end + frame.reply_before + frame.reply_after
        for t in hf["added_tokens"]:
            if t["content"] in plain or t["content"] in shown:
                refuse(t, ("lstrip", "rstrip", "single_word"), f"its token {t['content']!r}")
        eos = about.get("eos_token")
        names = [frame.end, eos["content"] if isinstance(eos, dict) else eos]
        ends = [special[name] for name in names if name in special]
        words = {*bpe["ranks"].values(), *bpe["unmade"].values()}
        stop = stop_tokens(ends, *others, special, words)
        said = others[0].get("eos_token_id", others[1].get("eos_token_id"))
        if not {*stop} <= {*(said if isinstance(said, list) else [said])}:  # for other programs
            files[FILES[2]] = json.dumps(others[0] | {"eos_token_id": sorted({*stop})}).encode()
        return Encoding(str(folder), special=special, stop=stop, files=files, frame=frame,
                        plain=plain, ends=ends, **bpe)
    except UserError as e:
        raise UserError(f"{folder}: {e}") from e
    except (OSError, LookupError, TypeError, ValueError, AttributeError) as e:
        raise UserError(f"{folder}: cannot read its tokenizer ({e.__class__.__name__}: {e})") from e

def chosen_frame(files, about, hf, special, asked):
    """The Frame for `asked`, chat and system. What is "auto" or "" is as in the frame that a run
    left among `files`, which is not built anew if nothing differs."""
    kept = Frame(**read_json(files[FRAME], FRAME)) if FRAME in files else Frame("auto")
    was = kept.chat, kept.system
    asked = tuple(old if x in ("auto", "") else x for x, old in zip(asked, was))
    if asked == was and FRAME in files:
        return kept
    chat, system = asked
    template = None if chat == "none" else find_template(files, about)
    if template is None:
        if system or chat in THINKING:
            raise UserError("--system and --chat think need a chat template, and none is used")
        return Frame("none" if chat == "none" else "", before=opening(hf, special))
    if "added_tokens_decoder" not in about:         # in older checkpoints
        about = about | read_json(files.get("special_tokens_map.json", b"{}"), FILES[4])
    tokens = {name: x["content"] if isinstance(x, dict) else x for name, x in about.items()
              if name.endswith("_token") and isinstance(x, str | dict)}
    special = [t["content"] for t in hf["added_tokens"]
               if t["special"] or t["content"] == tokens.get("eos_token")]
    return frame_of(template, tokens, special, chat, system)

def find_template(files, about):
    """The chat template in a folder's files, the default of several; None without one."""
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"].decode()
    template = about.get("chat_template")
    if isinstance(template, list):
        template = {x["name"]: x["template"] for x in template}.get("default", "")
    if template == "" or not isinstance(template, str | None):
        raise UserError("its chat template is not a string, or there are several and no default")
    return template

def stop_tokens(ends, generation, config, special, words):
    """The ids that end a completion: `ends` and what the two files name, as far as they are tokens.
    An ordinary token (in `words`) of config.json is a default that nobody chose, unless
    generation_config.json lists it or there is no other end."""
    default, chosen = (x.get("eos_token_id") for x in (config, generation))
    named = [x if isinstance(x, list) else [x] for x in (chosen, default)]
    known = [i for i in (*ends, *named[0], *named[1]) if i in words or i in special.values()]
    if isinstance(chosen, list) and default in chosen:
        default = None
    used = [i for i in known if i not in words or i != default] or known
    if not used:
        raise UserError("no file names a token that ends a text: set eos_token_id in "
                        "generation_config.json")
    return used

def opening(hf, special):
    """The special tokens that a tokenizer.json puts before every text."""
    post, opened = hf.get("post_processor") or {"type": "ByteLevel"}, ""
    for part in post.get("processors", [post]):
        if part["type"] == "TemplateProcessing":
            before = [*itertools.takewhile(lambda x: "SpecialToken" in x, part["single"])]
            names = [x["SpecialToken"]["id"] for x in before]
            if len(part["single"]) > len(names) + 1 or not special.keys() >= {*names}:
                raise UserError("its post_processor adds a token after a text, or an unknown token")
            opened += "".join(names)
        elif part["type"] != "ByteLevel":
            raise UserError(f"its post_processor {part['type']} is not supported")
    return opened

def decode(encoding, ids):
    """The text of a completion with special tokens by name, which may be tags that a reward looks
    for; without that which ended it."""
    return b"".join(map(encoding.token_bytes, ids)).decode("utf-8", "replace")

def pieces(encoding, ids):
    """The text of each token of a completion, joined that of `decode`; a character of several
    tokens goes to the last one."""
    decoder, last = codecs.getincrementaldecoder("utf-8")("replace"), len(ids) - 1
    return [decoder.decode(encoding.token_bytes(t), i == last or t in encoding.stop)
            for i, t in enumerate(ids)]

def step_tokens(encoding, ids, ends):
    """The index of the token that closes each step; `ends` count characters of the text. The stop
    token of a turn that others follow belongs to the step that ends before it."""
    done = list(itertools.accumulate(map(len, pieces(encoding, ids))))  # characters after each
    found = []
    for end in ends:
        i = min(bisect.bisect_left(done, end), len(ids) - 1)
        ends_turn = i + 2 < len(ids) and ids[i + 1] in encoding.stop and ids[i] not in encoding.stop
        found.append(i + 1 if ends_turn else i)
    return found

# ------------------------------------------------ the vocabulary and its merges

def read_bpe(hf, special):
    """Arguments of an Encoding, from a tokenizer.json."""
    model, normalizer = hf["model"], hf.get("normalizer") or dict(type="Sequence", normalizers=[])
    if model["type"] != "BPE":
        raise UserError(NOT_BYTE_LEVEL)
    *before, split = patterns_of(hf["pre_tokenizer"] or {})
    try:
        before = [regex.compile(pattern, regex.V1) for pattern in before]
        if any(pattern.search("") for pattern in (*before, regex.compile(split))):
            raise UserError("its tokenizer splits text by a pattern that matches nothing, too")
    except regex.error as e:
        raise UserError(f"its tokenizer splits text by a pattern that cannot be read: {e}") from e
    for pattern in before:  # of what has another meaning elsewhere
        if part := re.search(r"\\[wWbBhH]|\\[pP](?!\{)|--|~~|\|\|", pattern.pattern):
            raise UserError(f"its tokenizer splits text by several patterns, of which one has "
                            f"{part[0]}: that is not supported")
    changes = [part["type"] for part in normalizer.get("normalizers", [normalizer])]
    if others := {*changes} - {"NFC"}:
        raise UserError(f"its normalizer {min(others)} is not supported")
    refuse(model, ("dropout", "end_of_word_suffix", "continuing_subword_prefix"), "its tokenizer")
    if letters := sorted(special.keys() & BYTE_OF.keys() & model["vocab"].keys()):
        raise UserError(f"its added token {letters[0]!r} is also the letter of a byte")
    ids = {token: i for token, i in model["vocab"].items() if token not in special}
    all_ids = [*ids.values(), *special.values()]
    if not all(type(i) is int and 0 <= i < 2 ** 31 for i in all_ids) or (
            len({*all_ids}) < len(all_ids)):
        raise UserError("its token ids are not all different integers from 0 to 2**31 - 1")
    made = tokens_of_texts(model, special)
    ranks = {bytes(map(BYTE_OF.__getitem__, token)): i for token, i in ids.items()}
    unmade = {token: i for token, i in ranks.items() if i not in made}
    ranks = {token: i for token, i in ranks.items() if i in made}
    return dict(split=split, before=before, ranks=ranks, unmade=unmade, nfc=bool(changes))

def refuse(about, keys, whose):
    """UserError if one of these settings is on: it would change ids."""
    for key in keys:
        if about.get(key):
            raise UserError(f"{whose} has {key} {about[key]!r}, which is not supported")

def patterns_of(pre):
    """The patterns that split a text as a pre_tokenizer does, one after another; the matches of
    each are the whole text."""
    *before, level = parts = pre.get("pretokenizers", [pre])
    kinds = [part.get("type") for part in parts]
    if kinds[-1] != "ByteLevel" or level.get("add_prefix_space"):
        raise UserError(NOT_BYTE_LEVEL)
    if not {*kinds[:-1]} <= {"Split", "Digits"}:
        raise UserError(f"its tokenizer splits text in a way that is not supported: {kinds}")
    patterns = [pattern_of(part) for part in before]
    if level.get("use_regex", True):
        patterns.append(GPT2_SPLIT)
    return patterns or [r"[\s\S]+"]

def pattern_of(part):
    """The pattern of a Split or of Digits; the text between its matches is a piece too. In these
    files ^ and $ stand for the ends of a line: (?m)."""
    if part["type"] == "Digits":
        pattern = r"\p{N}" if part["individual_digits"] else r"\p{N}+"
    else:
        refuse(part, ("invert",), "its tokenizer's Split")
        if part["behavior"] != "Isolated":
            raise UserError(f"its tokenizer's Split has behavior {part['behavior']!r}, which is "
                            f"not supported")
        [(kind, pattern)] = part["pattern"].items()
        pattern = pattern if kind == "Regex" else re.escape(pattern)
    return rf"(?m)(?:{pattern})|(?:(?!{pattern})[\s\S])+"

def cut(text, patterns):
    """The pieces of a text, split by each pattern in turn."""
    pieces = [text]
    for pattern in patterns:
        pieces = [x.group() for piece in pieces for x in pattern.finditer(piece)]
    return pieces

def tokens_of_texts(model, special):
    """The ids that a text can have: those of letters, and of words that merges make of their
    letters. With these alone tiktoken, which joins any two tokens whose bytes are a token, in the
    order of ids, joins what merges do. `ignore_merges` adds all words as whole pieces, which
    tiktoken looks up first."""
    vocab, order = model["vocab"], {}
    for pair in model["merges"]:
        a, b = pair.split(" ") if isinstance(pair, str) else pair
        order.pop((a, b), None)  # of equal pairs the last one counts
        order[a, b] = vocab[a + b]
    if [*order.values()] != sorted(order.values()):
        raise UserError("its token ids are not in the order of its merges")
    made = {word for word in vocab if len(merged(word, order)) == 1}
    if model.get("ignore_merges"):
        for word in vocab.keys() - made - special.keys():
            parts = merged(word, order)
            if len(parts) == 2:
                raise UserError(f"its token {word!r} is {parts[0]!r} and {parts[1]!r}, which no "
                                f"merge joins")
        made = vocab.keys()
    return {vocab[word] for word in made}

def merged(word, order):
    """The tokens of a word: the first pair in `order` is joined, as long as there is one."""
    parts = [*word]
    while found := [(order[pair], i) for i, pair in enumerate(itertools.pairwise(parts))
                    if pair in order]:
        _, i = min(found)
        parts[i:i + 2] = [parts[i] + parts[i + 1]]
    return parts

"""Tokenizers as a `tiktoken.Encoding`: bytes, or the tokenizer.json of a checkpoint."""
import bisect
import codecs
import dataclasses
import itertools
import json
import re
import unicodedata
from pathlib import Path

import tiktoken

from data import UserError, read_bytes, read_json
from data.bpe import LETTERS, cut, read_bpe, refuse
from data.chat import BARE, THINKING, Frame, frame_of

END = "<|endoftext|>"
FRAME = "chat_frame.json"       # in a run's folder: the text around its prompts
FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja",
         "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", FRAME)
MORE = "additional_chat_templates"


def split_at(marks, text):
    """Split a text at each of `marks`, longest first; the marks are kept as pieces."""
    pattern = "|".join(map(re.escape, sorted(marks, key=len, reverse=True)))
    return re.split(f"({pattern})", text) if marks else [text]


def composed(text):
    """The NFC of a text. Combining characters are sorted beforehand: `normalize` alone would take
    quadratic time, 8 seconds for 100,000 of them."""
    if unicodedata.is_normalized("NFC", text):
        return text
    decomposed = "".join(unicodedata.normalize("NFD", c) for c in text)
    runs = (run for _, run in itertools.groupby(decomposed, lambda c: unicodedata.combining(c) > 0))
    ordered = (sorted(run, key=unicodedata.combining) for run in runs)
    return unicodedata.normalize("NFC", "".join(itertools.chain(*ordered)))


class Encoding(tiktoken.Encoding):
    """tiktoken's Encoding, plus what else a checkpoint's files specify.

    stop: the ids that end a completion; `end`, the first of them, is the one taught in training.
    frame: the Frame of a prompt. plain: names of added tokens that are recognised in any text.
    files: the files to save beside the weights, name to contents. before: patterns that split a
    text before `split` does. unmade: the ids of tokens that no text has, by their bytes. ends: the
    ids that end a text by name, even if they are not special. notes: lines for a run's header.
    """

    def __init__(self, name, split, ranks, special, stop, files, frame=Frame(), nfc=False,
                 plain=(), before=(), unmade={}, ends=(), notes=()):
        super().__init__(name, pat_str=split, mergeable_ranks=ranks, special_tokens=special)
        self.end, self.stop, self.files, self.frame = stop[0], frozenset(stop), files, frame
        self.nfc, self.special, self.before, self.notes = nfc, special, before, notes
        self.unmade = {i: token for token, i in unmade.items()}
        self.known = {*ranks.values(), *special.values(), *self.unmade}
        self.plain = plain
        control = {i for name, i in special.items() if name not in plain}
        self.silent = self.stop & (control | {*ends})
        self.missing = {b for b in range(256) if bytes([b]) not in ranks}

    def encode_ordinary(self, text):
        """Ids of a text; of the added tokens only `plain` ones are recognised."""
        ids = []
        for piece in split_at(self.plain, text):
            if piece in self.plain:
                ids.append(self.special[piece])
                continue
            if self.missing:        # a tokenizer that lacks some bytes drops their characters
                piece = piece.encode("utf-8", "replace").decode()   # a lone surrogate has no UTF-8
                piece = "".join(c for c in piece if self.missing.isdisjoint(c.encode()))
            for part in cut(composed(piece) if self.nfc else piece, self.before):
                ids += super().encode_ordinary(part)
        return ids

    def encode_prompt(self, text):
        """Ids of a prompt in its frame."""
        ids = self.encode_framed(self.frame.before, text, self.frame.after)
        if not ids:
            raise UserError("the prompt is empty: there is nothing to sample from")
        return ids

    def encode_reply(self, text):
        """Ids of what the environment says after the policy's stop token, as a message of the chat
        template if there is one."""
        before, after = self.frame.reply_before, self.frame.reply_after
        if self.frame.chat not in ("", "none") and not before + after:
            raise UserError(f"{self.name}: its chat template has no place for a reply, or {FRAME} "
                            f"is older than replies: delete it to have it rebuilt{BARE}")
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

    def decode_single_token_bytes(self, token):
        """The bytes of a token, also of one that no text has but a model may sample."""
        if token in self.unmade:
            return self.unmade[token]
        return super().decode_single_token_bytes(token)

    def encode_demonstration(self, text):
        """Ids of what the policy is to say, and the end token. Special tokens are recognised, as
        the policy may sample them."""
        return self.encode_framed(text, "", "") + [self.end]

    def token_bytes(self, token):
        """The bytes of a token's text, of a special token its name; empty for a special token that
        ends a completion, and for an id that only pads the model's vocabulary."""
        if token in self.silent or token not in self.known:
            return b""
        return self.decode_single_token_bytes(token)


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
    """The tokenizer in a checkpoint's folder; raises UserError if it is not a byte-level BPE.
    `chat` and `system` choose the text around prompts: see `chosen_frame`."""
    folder = Path(folder)
    names = (*FILES, *(f"{MORE}/{path.name}" for path in (folder / MORE).glob("*.jinja")))
    files = {name: read_bytes(folder / name) for name in names if (folder / name).is_file()}
    if "tokenizer.json" not in files:
        if "vocab.json" in files:
            raise UserError(f"{folder} has vocab.json, but no tokenizer.json; transformers writes "
                            f"one, in Python: AutoTokenizer.from_pretrained({str(folder)!r})"
                            f".save_pretrained({str(folder)!r})")
        raise UserError(f"no model in {folder}: tokenizer.json is missing; train a model first, or "
                        f"fetch one: hf download NAME --local-dir FOLDER")
    try:
        hf, about, *others = (read_json(files.get(name, b"{}"), name) for name in FILES[:3])
        others.append(read_json(read_bytes(folder / "config.json"), "config.json"))
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
        ends = ends_by_name(about, special, frame.end)
        stop = stop_tokens(ends, others)
        words = {i: token for token, i in (bpe["ranks"] | bpe["unmade"]).items()}
        stop, notes = used_stops(stop, *others, special, words)
        return Encoding(str(folder), special=special, stop=stop, files=files, frame=frame,
                        plain=plain, ends=ends, notes=notes, **bpe)
    except UserError as e:
        raise UserError(f"{folder}: {e}") from e
    except (OSError, LookupError, TypeError, ValueError, AttributeError) as e:
        raise UserError(f"{folder}: cannot read its tokenizer ({e.__class__.__name__}: {e})") from e


def chosen_frame(files, about, hf, special, asked):
    """The Frame for `asked`, chat and system. What is "auto" or "" is taken from the frame among
    the folder's `files`, if a run left one there. If nothing differs from that frame, it is
    returned itself, not rebuilt from the template."""
    kept = Frame(**read_json(files[FRAME], FRAME)) if FRAME in files else Frame("auto")
    was = kept.chat, kept.system
    asked = tuple(old if x in ("auto", "") else x for x, old in zip(asked, was))
    if asked == was and FRAME in files:
        return kept
    chat, system = asked
    template = None if chat == "none" else find_template(files, about)
    if template is None:
        if system or chat in THINKING:
            raise UserError("--system and --chat think need a chat template, and there is none")
        return Frame("none" if chat == "none" else "", before=opening(hf, special))
    if "added_tokens_decoder" not in about:         # in older checkpoints
        about = about | read_json(files.get("special_tokens_map.json", b"{}"), FILES[4])
    tokens = {name: x["content"] if isinstance(x, dict) else x for name, x in about.items()
              if name.endswith("_token") and isinstance(x, str | dict)}
    special = [t["content"] for t in hf["added_tokens"]
               if t["special"] or t["content"] == tokens.get("eos_token")]
    return frame_of(template, tokens, special, chat, system)


def find_template(files, about):
    """The chat template in a folder's files, the default if there are several; None without one."""
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"].decode()
    template = about.get("chat_template")
    if isinstance(template, list):
        template = {x["name"]: x["template"] for x in template}.get("default", "")
    if template == "" or not isinstance(template, str | None):
        raise UserError("its chat template is not a string, or there are several and no default")
    return template


def ends_by_name(about, special, end):
    """The ids of `end`, the end of a chat turn, and of tokenizer_config.json's (`about`) end of a
    text, as far as there are such tokens."""
    eos = about.get("eos_token")
    names = [end, eos["content"] if isinstance(eos, dict) else eos]
    return [special[name] for name in names if name in special]


def stop_tokens(ends, others):
    """The ids that end a completion: first `ends`, then those of the files `others`."""
    stop = [*ends]
    for other in others:
        stop += ends_of(other)
    if not (stop := [x for x in stop if x is not None]):
        raise UserError("no file names a stop token: set eos_token_id in generation_config.json")
    if wrong := [x for x in stop if type(x) is not int or x < 0]:
        raise UserError(f"eos_token_id {wrong[0]!r} is not a token id")
    return stop


def ends_of(config):
    """The ids that end a completion by one of the files."""
    ends = config.get("eos_token_id")
    return ends if isinstance(ends, list) else [ends]


def used_stops(stop, generation, config, special, words):
    """The ids in `stop` that end a completion, and a note on each that does not: an id of no token,
    and an ordinary token (in `words`: its bytes) that config.json alone names, or generation_config
    too as its only one. Such an id is a default of the family, which nobody chose; a list is
    chosen. If there is no other end, ordinary tokens are used."""
    default, chosen = (x.get("eos_token_id") for x in (config, generation))
    if isinstance(chosen, list) and default in chosen:
        default = None
    ordinary = [i for i in stop if i in words]
    names = {i: f"the ordinary token {words[i].decode('utf-8', 'replace')!r}" for i in ordinary}
    names |= {i: repr(name) for name, i in special.items()}
    used = [i for i in stop if i in names and not (i in ordinary and i == default)]
    if not used and not ordinary:
        raise UserError(f"eos_token_id {stop[0]} is no token of its tokenizer, and no file names "
                        f"another end: set eos_token_id in generation_config.json")
    if not used:
        return ordinary, [f"no file names an end but eos_token_id {ordinary[0]}: completions end "
                          f"with {names[ordinary[0]]}"]
    notes = []
    for i in dict.fromkeys(stop):
        if i not in used:
            file = "config.json" if i in ends_of(config) else "generation_config.json"
            notes.append(f"eos_token_id {i} of {file} is {names.get(i, 'no token')}: completions "
                         f"end with {names[used[0]]} instead")
    return used, notes


def opening(hf, special):
    """The special tokens that a tokenizer.json puts before every text, as one string."""
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
    """The text of a completion: all that was said, special tokens by name, except that which ended
    it. A reward may look for tags whether they are special tokens or not."""
    return b"".join(map(encoding.token_bytes, ids)).decode("utf-8", "replace")


def pieces(encoding, ids):
    """The text of each token of a completion; a character of several tokens goes to the last one.
    Joined, these are what `decode` gives, or gives for each turn."""
    decoder, last = codecs.getincrementaldecoder("utf-8")("replace"), len(ids) - 1
    return [decoder.decode(encoding.token_bytes(t), i == last or t in encoding.stop)
            for i, t in enumerate(ids)]


def step_tokens(encoding, ids, ends):
    """Index in `ids` of the token that closes each step; `ends` count characters of the text. The
    stop token of a turn that others follow belongs to the step that ends before it."""
    done = list(itertools.accumulate(map(len, pieces(encoding, ids))))  # characters after each
    found = []
    for end in ends:
        i = min(bisect.bisect_left(done, end), len(ids) - 1)
        ends_turn = i + 2 < len(ids) and ids[i + 1] in encoding.stop
        found.append(i + 1 if ends_turn else i)
    return found

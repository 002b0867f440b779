"""What a tokenizer.json says about ids: the pieces of a text, and the tokens that merges make."""
import itertools
import re

import regex        # a requirement of tiktoken; Python's `re` has no \p{L}
import tiktoken

from data import UserError

BYTES = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))     # printable bytes
BYTES += [b for b in range(256) if b not in BYTES]
LETTERS = dict(zip(BYTES, map(chr, [*BYTES[:188], *range(256, 324)])))   # GPT-2's letter of a byte
BYTE_OF = {letter: byte for byte, letter in LETTERS.items()}
GPT2_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGITS_SPLIT = GPT2_SPLIT.replace(r" ?\p{N}+", r"\p{N}").replace(r"(?!\S)", r"(?![^\s\p{N}])")


def read_bpe(hf, special):
    """From a tokenizer.json, arguments of an Encoding: the pattern that splits a text, those that
    split it before, the ids by the bytes of the token, those of tokens that no text has, and
    whether text is normalised to NFC. Ids must be in the order of the merges: tiktoken merges by
    id."""
    model, normalizer = hf["model"], hf.get("normalizer") or dict(type="Sequence", normalizers=[])
    if model["type"] != "BPE":
        raise UserError("its tokenizer is not a byte-level BPE")
    *before, split = patterns_of(hf["pre_tokenizer"] or {})
    try:
        before = [regex.compile(pattern, regex.V1) for pattern in before]
    except regex.error as e:
        raise UserError(f"its tokenizer splits text by a pattern that cannot be read: {e}") from e
    for pattern in before:
        # Those that elsewhere have another meaning.
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
    distinct = {*ids.values(), *special.values()}
    if not all(type(i) is int and 0 <= i < 2 ** 31 for i in distinct):
        raise UserError("its token ids are not all integers from 0 to 2**31 - 1")
    if len(distinct) < len(ids) + len(special):
        raise UserError("two of its tokens have the same id")
    made = tokens_of_texts(model, special)
    ranks = {bytes(map(BYTE_OF.__getitem__, token)): i for token, i in ids.items()}
    unmade = {token: i for token, i in ranks.items() if i not in made}
    ranks = {token: i for token, i in ranks.items() if i in made}
    return dict(split=split, before=before, ranks=ranks, unmade=unmade, nfc=bool(changes))


def refuse(about, keys, whose):
    """Raise UserError if one of these settings is on: it would change the ids of a text."""
    for key in keys:
        if about.get(key):
            raise UserError(f"{whose} has {key} {about[key]!r}, which is not supported")


# -------------------------------------------------------------------------------------- the pieces

def patterns_of(pre):
    """The patterns that split a text as a pre_tokenizer does, one after another; each matches any
    text from its beginning to its end."""
    *before, level = parts = pre.get("pretokenizers", [pre])
    kinds = [part.get("type") for part in parts]
    if kinds[-1] != "ByteLevel" or level.get("add_prefix_space"):
        raise UserError("its tokenizer is not a byte-level BPE")
    if not {*kinds[:-1]} <= {"Split", "Digits"}:
        raise UserError(f"its tokenizer splits text in a way that is not supported: {kinds}")
    with_regex = level.get("use_regex", True)
    if kinds == ["Digits", "ByteLevel"] and with_regex and before[0]["individual_digits"]:
        return [DIGITS_SPLIT]           # one pattern for both: tiktoken alone is faster
    patterns = [pattern_of(part) for part in before]
    if with_regex:
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
    if may_be_empty(pattern):
        raise UserError(f"its tokenizer splits text by a pattern that may be empty: {pattern!r}")
    return rf"(?m)(?:{pattern})|(?:(?!{pattern})[\s\S])+"


def may_be_empty(pattern):
    """Whether a pattern can match the empty string between two characters: tiktoken would panic."""
    ranks, any_ = {bytes([i]): i for i in range(256)}, r"[\s\S]"
    empty = tiktoken.Encoding("empty", pat_str=f"(?m){any_}(?:{pattern})(?<!{any_}{any_}){any_}",
                              mergeable_ranks=ranks, special_tokens={})
    text = "".join(map(chr, range(9, 256))) + "ab 12  \n\n'' A"
    return any(empty.encode_ordinary(a + b) for a, b in itertools.pairwise(text))


def cut(text, patterns):
    """The pieces of a text: each pattern splits those that the one before it leaves. Lookarounds
    end at a piece, so that several patterns are not one."""
    pieces = [text]
    for pattern in patterns:
        pieces = [x.group() for piece in pieces for x in pattern.finditer(piece)]
    return pieces


# -------------------------------------------------------------------------------------- the merges

def tokens_of_texts(model, special):
    """The ids that a text can have: those of letters, and of words that merges make of their
    letters. With these alone tiktoken, which joins any two tokens whose bytes are a token, joins
    what merges do: where two that make a word lie side by side, only the merges of its own letters
    were made there, the same as in the word alone. `ignore_merges` adds all words as whole pieces,
    which tiktoken looks up first."""
    vocab, order = model["vocab"], {}
    for pair in model["merges"]:
        a, b = pair.split(" ") if isinstance(pair, str) else pair
        order[a, b] = vocab[a + b]
    if [*order.values()] != sorted(order.values()):
        raise UserError("its token ids are not in the order of its merges")
    made = made_words(vocab, order)
    if model.get("ignore_merges"):
        for word in vocab.keys() - made - special.keys():
            parts = merged(word, order)
            if len(parts) == 2:
                raise UserError(f"its token {word!r} is {parts[0]!r} and {parts[1]!r}, which no "
                                f"merge joins")
        made = vocab.keys()
    return {vocab[word] for word in made}


def made_words(vocab, order):
    """The words that merges make of their letters. `order`: the ids of merged pairs, ascending. A
    pair of words made with lower ids is tried at its seam alone; what that leaves is merged in
    full."""
    made = {letter: (-1, letter, letter) for letter in BYTE_OF}     # id and halves of a word
    for (a, b), i in order.items():
        if a in made and b in made and is_free(a, b, order, made):
            made[a + b] = i, a, b
    others = {a + b for a, b in order} - made.keys()
    found = made.keys() | {word for word in others if len(merged(word, order)) == 1}
    return found & vocab.keys()


def is_free(a, b, order, made):
    """Whether no merge joins an end of `a` to a beginning of `b` before both are whole. Their own
    merges are undone, latest first: what lies at the seam may not be a pair that comes before the
    merge just undone. Of equal merges the left one comes first."""
    while len(a) + len(b) > 2:
        (i, _, end), (j, begin, _) = made[a], made[b]
        if i > j:
            a, until = end, i
        else:
            b, until = begin, j + 1
        if order.get((a, b), until) < until:
            return False
    return True


def merged(word, order):
    """The tokens of a word: the first pair in `order` is joined, the leftmost of equals, as long as
    there is one."""
    parts = [*word]
    while found := [order[pair] for pair in itertools.pairwise(parts) if pair in order]:
        first = min(found)
        at = [order.get(pair) for pair in itertools.pairwise(parts)].index(first)
        parts[at:at + 2] = ["".join(parts[at:at + 2])]
    return parts

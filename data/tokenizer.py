"""Bytes as tokens: a `tiktoken.Encoding` of the 256 bytes and one special token. No download."""
import bisect
import codecs
import itertools
import os
import sys

import tiktoken

END = "<|endoftext|>"


def byte_encoding():
    """Encoding with ids 0-255 for the bytes and 256 for END (`encoding.eot_token`).

    Encode with `encode_ordinary`: END spelled out in a text is then text like any other.
    """
    return tiktoken.Encoding(
        name="bytes",
        pat_str=r"[\s\S]",
        mergeable_ranks={bytes([i]): i for i in range(256)},
        special_tokens={END: 256},
    )


def decode(encoding, ids):
    """The text of a completion, without the end token."""
    return encoding.decode([t for t in ids if t != encoding.eot_token])


def coloured(encoding, ids, adv):
    """The text of tokens on one line. In a terminal green is to become likelier, red less likely,
    and in grey there is nothing to learn."""
    pieces = [encoding.decode([t]).replace("\n", " ⏎ ") for t in ids]
    if sys.stdout.isatty() and "NO_COLOR" not in os.environ:
        codes = (32 if a > 0 else 31 if a < 0 else 90 for a in adv)
        pieces = [f"\x1b[{code}m{piece}\x1b[0m" for code, piece in zip(codes, pieces)]
    return "".join(pieces)


def step_tokens(encoding, ids, ends):
    """Which token of `ids` closes each step, for `ends` in characters of their text."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    lengths = (len(decoder.decode(encoding.decode_single_token_bytes(t))) for t in ids)
    done = list(itertools.accumulate(lengths))                  # characters after each token
    return [min(bisect.bisect_left(done, end), len(ids) - 1) for end in ends]

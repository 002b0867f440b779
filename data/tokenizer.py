"""Bytes as tokens: a `tiktoken.Encoding` of the 256 bytes and one special token. No download."""
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

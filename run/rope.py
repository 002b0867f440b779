"""RoPE for contexts longer than a model was first trained for, as in transformers: position
interpolation (arXiv 2306.15595), Llama 3's scaling (2407.21783) and YaRN (2309.00071)."""
import math

import torch

from data import UserError

CONTEXT = "original_max_position_embeddings"
KINDS = ("linear", "llama3", "yarn")

def settings(hf):
    """Those in a config.json's dict, and `rope_theta`. As in transformers, `rope_scaling` takes
    precedence over `rope_parameters`, a rope_theta inside either over one outside, and an original
    context outside over one inside."""
    given = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise UserError(f"rope scaling must be a JSON object, not {given!r:.100}")
    given = {"rope_theta": hf.get("rope_theta", 10000.0)} | given
    if hf.get(CONTEXT):
        given[CONTEXT] = hf[CONTEXT]
    return given

def scaled(cfg, given):
    """GPTConfig's fields for the settings `given` in a config.json, of which cfg holds the rest;
    none if nothing is scaled. In float32, and in transformers' order: far out in a context a
    frequency that is rounded otherwise gives another angle."""
    kind = given.get("rope_type", given.get("type", "default"))
    if not 1 < cfg.rope_theta < math.inf:
        raise UserError(f"rope_theta must be a number over 1, not {cfg.rope_theta}")
    if kind == "default":
        return {}
    if kind not in KINDS:
        raise UserError(f"rope scaling {kind!r} is not one of {', '.join(KINDS)}")
    context = number(given, CONTEXT, cfg.block_size)
    factor = number(given, "factor", cfg.block_size / context if kind == "yarn" else None)
    period = cfg.rope_theta ** (torch.arange(0, cfg.head_size, 2) / cfg.head_size)  # of a radian
    inv_freq = 1 / period
    scale = 1.0
    if kind == "linear":
        inv_freq = inv_freq / factor
    if kind == "llama3":        # divides those whose period is long for the original context
        low = number(given, "low_freq_factor")
        high = number(given, "high_freq_factor")
        kept = (context * inv_freq / (2 * torch.pi) - low) / (high - low)
        inv_freq = torch.lerp(inv_freq / factor, inv_freq, kept.clamp(0, 1))
    if kind == "yarn":
        kept = 1 - yarn_ramp(cfg, given, context)
        inv_freq = 1 / (factor * period) * (1 - kept) + inv_freq * kept
        scale = yarn_scale(given, factor)
    return dict(rope_inv_freq=tuple(inv_freq.tolist()), rope_scale=scale)

def yarn_ramp(cfg, given, context):
    """How far YaRN scales each frequency, from 0 for beta_fast turns and more within the original
    context to 1 for beta_slow turns and fewer."""
    def index(turns):
        """The frequency of so many turns, as an index (not an integer)."""
        period = context / (turns * 2 * math.pi)
        return cfg.head_size * math.log(period) / (2 * math.log(cfg.rope_theta))

    first = index(number(given, "beta_fast", 32))
    last = index(number(given, "beta_slow", 1))
    if given.get("truncate", True):
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, cfg.head_size - 1)
    if first == last:
        last += 0.001
    ramp = (torch.arange(cfg.head_size // 2) - first) / (last - first)
    return ramp.clamp(0, 1)

def yarn_scale(given, factor):
    """YaRN's factor of cos and sin: the one given, or one that grows with log(factor)."""
    def scale(weight):
        """1, and more with the logarithm of the factor."""
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    found = scale(1)
    if given.get("mscale") and given.get("mscale_all_dim"):         # DeepSeek's
        found = scale(number(given, "mscale")) / scale(number(given, "mscale_all_dim"))
    return float(number(given, "attention_factor", found))

def number(given, key, default=None):
    """A setting, or its default if it is missing or 0; raises UserError for what is no number."""
    x = given.get(key) or default
    if type(x) not in (int, float) or not 1e-6 <= x <= 1e9:
        raise UserError(f"rope scaling: {key} must be a number from 1e-6 to 1e9, not {x!r:.50}")
    return x

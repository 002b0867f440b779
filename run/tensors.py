"""The tensors in a checkpoint by name, and their validation."""
import hashlib
import itertools

import torch

from data import UserError
from run import shard

ROLES = ("policy", "ref", "critic", "reward_model")
MOMENTS = ("step", "exp_avg", "exp_avg_sq")             # at least these, if the optimizer is Adam
ROWS = dict(ids=torch.int64, mask=torch.bool, ends=torch.bool, label=torch.float32)

def modules(agent):
    """The modules that a run has, by role."""
    return {role: getattr(agent, role) for role in ROLES if getattr(agent, role) is not None}

def named_parameters(agent):
    """The parameters of a run by role and name; of sharded ones, this rank's shards."""
    return {f"{role}.{n}": p for role, module in modules(agent).items()
            for n, p in shard.parameters(module).items()}

def training_state(agent):
    """Every tensor of a run by name: the parameters by role, the optimizer's state, and the
    history of labelled rows."""
    named = named_parameters(agent)
    rows = {f"history.{n}": x for n, x in agent.history.items()}
    return {n: p.detach() for n, p in named.items()} | optimizer_state(agent.opt, named) | rows

def optimizer_state(opt, named):
    """The state of any optimizer as tensors `opt.<key>.<parameter>`; named: parameters by name."""
    state = {f"opt.{key}.{n}": x for n, p in named.items()
             for key, x in opt.state.get(p, {}).items() if x is not None}
    if wrong := [n for n, x in state.items() if not isinstance(x, torch.Tensor)]:
        raise UserError(f"a checkpoint cannot hold {wrong[0]}: it is no tensor")
    return state

def restore_optimizer(opt, named, tensors):
    """Gives an optimizer the state that `optimizer_state` returned."""
    names = {p: n for n, p in named.items()}
    params = [p for group in opt.param_groups for p in group["params"]]
    keys, state = state_keys(tensors, names.values()), {}
    for i, p in enumerate(params):
        found = {key: tensors.get(f"opt.{key}.{names[p]}") for key in keys}
        state[i] = {key: shard.like(p, x) if x.shape == p.shape else x.clone()
                    for key, x in found.items() if x is not None}
    groups = opt.state_dict()["param_groups"]
    opt.load_state_dict({"state": {i: x for i, x in state.items() if x}, "param_groups": groups})

def state_keys(tensors, names):
    """The keys in the optimizer's state of any of these parameters: exp_avg, momentum_buffer."""
    parts = [n.split(".", 2) for n in tensors if n.startswith("opt.")]
    return sorted({part[1] for part in parts if part[-1] in names})

def wanted(agent, checkpoint):
    """The tensors that a Checkpoint must have: for each name one of the right shape and dtype. A
    fused optimizer would write beyond a moment smaller than its parameter; any other one may have
    what it likes for each parameter."""
    want, have = named_parameters(agent), checkpoint.tensors
    names = {p: n for n, p in want.items()}
    least = set(MOMENTS if isinstance(agent.opt, torch.optim.Adam | torch.optim.AdamW) else ())
    for group in agent.opt.param_groups if checkpoint.step > 0 else ():
        trained = {names[p] for p in group["params"]}
        for key, n in itertools.product(least | {*state_keys(have, trained)}, trained):
            name = f"opt.{key}.{n}"
            if group.get("fused"):
                want[name] = have.get(name, want[n]) if key == "step" else want[n]
            elif name in have:
                want[name] = have[name]
    if checkpoint.step > 0 and agent.reward_model is not None:
        shape = checkpoint.tensors.get("history.ids", torch.zeros(0, 0)).shape
        want |= {f"history.{n}": torch.empty(shape, dtype=dtype, device="meta")
                 for n, dtype in ROWS.items()}
    return want

def check_tensors(agent, checkpoint):
    """Raises UserError unless a Checkpoint has exactly the `wanted` tensors, with valid values."""
    want, have = wanted(agent, checkpoint), checkpoint.tensors
    wrong = sorted(want.keys() ^ have.keys())
    wrong += [n for n in want.keys() & have.keys() if have[n].shape != want[n].shape
              or have[n].dtype != want[n].dtype and not n.startswith("ref.")]   # rounded on a GPU
    if wrong:
        raise UserError(f"{agent.cfg.folder}: tensors missing, unexpected, or of a wrong shape or "
                        f"dtype: {wrong[0]}" + (f" and {len(wrong) - 1} more" if wrong[1:] else ""))
    wrong = [n for n, x in have.items() if x.is_floating_point() and not finite(x)
             or n.startswith("opt.exp_avg_sq.") and x.min() < 0]
    steps = {x.item(): n for n, x in have.items() if n.startswith("opt.step.")}
    if len(steps) > 1 or min(steps, default=1) < 1:         # one step count for all parameters
        wrong += steps.values()
    ids = have.get("history.ids", torch.zeros(0, 1))
    if ids.dim() != 2 or len(ids) % agent.cfg.choices or len(ids) and not (
            0 <= ids.min() and ids.max() < agent.policy.cfg.vocab_size):
        wrong.append("history.ids")
    if wrong:
        raise UserError(f"{agent.cfg.folder}: the tensor {wrong[0]} has invalid values")

def sha256_of(tensors):
    """SHA-256 of a dict of CPU tensors: names, dtypes, shapes, bytes. 2 GB take seconds."""
    sha256 = hashlib.sha256()
    for name, x in sorted(tensors.items()):
        sha256.update(f"{name} {x.dtype} {tuple(x.shape)}\n".encode())
        sha256.update(x.contiguous().flatten().view(torch.uint8).numpy())
    return sha256.hexdigest()

def finite(tensor):
    """Whether all values of a tensor are finite, without allocating another of its size."""
    return not tensor.numel() or bool(torch.stack(tensor.aminmax()).isfinite().all())

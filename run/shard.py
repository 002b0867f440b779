"""Sharding with PyTorch's FSDP2: each rank keeps a shard of every parameter, of its gradient and of
Adam's moments. A layer is gathered while it computes, the embedding until the backward pass ends;
gradients are reduce-scattered as sums."""
import torch
from torch.distributed import ReduceOp

from data import UserError
from model import Block
from run import caches, machine

def is_on(cfg):
    """Whether models are sharded: --shard on, and more than one rank."""
    return cfg.shard == "on" and machine.world()[1] > 1

def shard_module(cfg, module):
    """Shards a module in place, if sharding is on: layer by layer, then the rest, except frozen
    parameters of a trained module (a reward model's norm)."""
    if is_on(cfg):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        mesh = init_device_mesh(machine.resolve(cfg)[0].type, (machine.world()[1],))
        trained = any(p.requires_grad for p in module.parameters())
        ignored = {p for p in module.parameters() if trained and not p.requires_grad}
        blocks = [block for block in module.modules() if isinstance(block, Block)]
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh, reshard_after_forward=False, ignored_params=ignored)
        for part in [*blocks, module]:
            part.set_gradient_divide_factor(1.0)        # a sum: the loss is weighted over all ranks
            part.set_force_sum_reduction_for_comms(True)
    return module

def is_sharded(x):
    """Whether a tensor or a module is sharded: a DTensor, an FSDPModule."""
    return hasattr(x, "reshard" if isinstance(x, torch.nn.Module) else "full_tensor")

def parameters(module):
    """The parameters by name; of a sharded module, this rank's shards."""
    if is_sharded(module):
        module.reshard()
    return dict(module.named_parameters())

def full(x):
    """A sharded tensor gathered from all ranks; any other tensor unchanged."""
    return x.full_tensor() if is_sharded(x) else x

def for_the_first_rank(x):
    """A sharded tensor, gathered to the first rank's CPU; any other tensor unchanged."""
    if not is_sharded(x):
        return x
    gathered = full(x)                          # a collective, called on every rank
    return gathered.cpu() if machine.world()[0] == 0 else x

def summed(grad):
    """A gradient summed over the ranks; FSDP2 has already summed a sharded one."""
    return grad if is_sharded(grad) else machine.all_reduce(grad)

def like(p, x):
    """A copy of tensor x placed like parameter p: on the same device, with the same sharding."""
    x = x.to(p.device, copy=True)
    if not is_sharded(p) or x.shape != p.shape:         # Adam's step count is a scalar
        return x
    from torch.distributed.tensor import distribute_tensor
    return distribute_tensor(x, p.device_mesh, p.placements, src_data_rank=None)

def check_alike(tensors):
    """Raises UserError if tensors that are not sharded differ between the ranks."""
    if machine.world()[1] == 1:
        return
    total = 0
    for x in tensors.values():          # a checksum that depends on the order of the tensors
        bits = x.new_zeros(0) if is_sharded(x) else x.contiguous().flatten()
        total = (3 * total + bits.view(torch.uint8).sum(dtype=torch.int64).item()) % 2 ** 60
    total = torch.tensor(total, device=machine.common_device())
    if machine.all_reduce(total, ReduceOp.MIN) != machine.all_reduce(total, ReduceOp.MAX):
        raise UserError("the ranks no longer hold the same weights; continue from the last "
                        "checkpoint with --resume")

@torch.no_grad()
def copy_weights(copied, policy):
    """Copies the policy's current weights and buffers into a frozen copy. The copy's head may be
    untied where the policy's is tied (`models.frozen`); any other difference in names or shapes
    raises UserError."""
    source = parameters(policy) | dict(policy.named_buffers())
    target = parameters(copied) | dict(copied.named_buffers())
    if policy.cfg.tied and "lm_head.weight" in target:
        source["lm_head.weight"] = source["embed_tokens.weight"]
    if unmatched := sorted(source.keys() ^ target.keys()):
        where = "policy" if unmatched[0] in source else "frozen copy of the policy"
        raise UserError(f"cannot copy the policy: only the {where} has {unmatched[0]}")
    for name, p in target.items():
        x = source[name] if is_sharded(p) else full(source[name])
        if p.numel() == 0:                              # freed by `release`
            p.data = p.data.new_empty(x.shape)
        if p.shape != x.shape:
            raise UserError(f"cannot copy the policy: {name} has the shape {tuple(x.shape)}, and "
                            f"{tuple(p.shape)} in its frozen copy")
        p.copy_(x)

def release(agent):
    """Frees the unsharded copy of a sharded policy, whose memory the update needs."""
    if is_sharded(agent.policy):
        caches.forget(agent.sampler)
        for p in agent.sampler.parameters():
            p.data = p.data.new_empty(0)

def refresh(agent):
    """Copies the policy's current weights into the sampler, if there is one."""
    if agent.sampler is not None:
        copy_weights(agent.sampler, agent.policy)

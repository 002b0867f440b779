"""Models dealt to the ranks, by PyTorch's FSDP2: each rank keeps a part of every parameter, of its
gradient and of Adam's moments. A layer is whole while it computes, the embedding until the gradient
is made; gradients are summed over the ranks as they are dealt back."""
import torch
from torch.distributed import ReduceOp

from data import Fault
from model import Block
from run import machine

def shards(cfg):
    """Whether models are dealt to the ranks: there are several, and cfg says so."""
    return cfg.shard == "on" and machine.world()[1] > 1

def deal(cfg, module):
    """The module, of whose parameters this rank keeps a part if cfg says so: a layer at a time,
    then the rest. What is not trained in a module that is stays whole: a reward model's norm."""
    if shards(cfg):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        mesh = init_device_mesh(machine.resolve(cfg)[0].type, (machine.world()[1],))
        trained = any(p.requires_grad for p in module.parameters())
        apart = {p for p in module.parameters() if trained and not p.requires_grad}
        parts = [part for part in module.modules() if isinstance(part, Block)]
        for part in parts:
            fully_shard(part, mesh=mesh)
        fully_shard(module, mesh=mesh, reshard_after_forward=False, ignored_params=apart)
        for part in [*parts, module]:
            part.set_gradient_divide_factor(1.0)        # a plain sum: the loss has its weights
            part.set_force_sum_reduction_for_comms(True)
    return module

def is_dealt(x):
    """Whether a tensor or a module is dealt: a DTensor, an FSDPModule."""
    return hasattr(x, "reshard" if isinstance(x, torch.nn.Module) else "full_tensor")

def parameters(module):
    """The parameters by name, of a module that is dealt this rank's parts."""
    if is_dealt(module):
        module.reshard()
    return dict(module.named_parameters())

def whole(x):
    """A tensor that is dealt, as all ranks together have it; any other as it is."""
    return x.full_tensor() if is_dealt(x) else x

def for_the_first_rank(x):
    """A tensor that is dealt, whole and on the CPU on the first rank; any other as it is."""
    if not is_dealt(x):
        return x
    gathered = whole(x)                         # all ranks take part
    return gathered.cpu() if machine.world()[0] == 0 else x

def summed(grad):
    """A gradient, summed over the ranks; one that is dealt was summed as it was dealt."""
    return grad if is_dealt(grad) else machine.all_reduce(grad)

def like(p, x):
    """The tensor x as the parameter p is: on its device, dealt if it is."""
    x = x.to(p.device, copy=True)
    if not is_dealt(p) or x.shape != p.shape:           # Adam's count of steps is one number
        return x
    from torch.distributed.tensor import distribute_tensor
    return distribute_tensor(x, p.device_mesh, p.placements, src_data_rank=None)

def check_alike(tensors):
    """Raise Fault if the ranks no longer hold the same numbers in what is not dealt."""
    if machine.world()[1] == 1:
        return
    total = 0
    for x in tensors.values():          # bytes count by their place among the tensors
        bits = x.new_zeros(0) if is_dealt(x) else x.contiguous().flatten()
        total = (3 * total + bits.view(torch.uint8).sum(dtype=torch.int64).item()) % 2 ** 60
    total = torch.tensor(total, device=machine.common_device())
    if machine.all_reduce(total, ReduceOp.MIN) != machine.all_reduce(total, ReduceOp.MAX):
        raise Fault("the ranks differ in what they have learned; go on from the last checkpoint "
                    "with --resume")

@torch.no_grad()
def take(copied, policy):
    """Let a frozen copy of the policy take its weights as they are now."""
    theirs = parameters(policy)
    for name, p in parameters(copied).items():
        x = theirs.get(name, theirs["embed_tokens.weight"])     # the copy's head may stand apart
        x = x if is_dealt(p) else whole(x)
        if p.shape != x.shape:                                  # it was let go of
            p.data = p.data.new_empty(x.shape)
        p.copy_(x)

def release(agent):
    """Let go of the whole copy of a policy that is dealt: what an update needs takes its room."""
    if is_dealt(agent.policy):
        for p in agent.sampler.parameters():
            p.data = p.data.new_empty(0)

def refresh(agent):
    """Let the copy to sample from, if there is one, be what the policy is now."""
    if agent.sampler is not None:
        take(agent.sampler, agent.policy)

"""The optimizer, its step across ranks, and supervised training."""
import math

import torch

from data import UserError
from run import machine, shard, show

def new_optimizer(modules, lr, eps=1e-8):
    """AdamW for the modules that are not None. No weight decay: it would pull weights to 0,
    away from the pretrained ones."""
    params = [p for module in filter(None, modules) for p in module.parameters() if p.requires_grad]
    return torch.optim.AdamW(params, lr, betas=(0.9, 0.95), eps=eps, weight_decay=0, fused=True)

def scale_rates(opt, factor):
    """Sets the learning rate of each group to a factor times the one that it began with."""
    for group in opt.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor

def optimizer_step(opt, grad_clip):
    """Sums the gradients over the ranks, clips, steps, clears; returns the norm before clipping,
    which is over all weights, those of a separate critic included, as in the original PPO code
    and in CleanRL. (Adam cancels most of a common factor.)"""
    params = [p for group in opt.param_groups for p in group["params"]]
    for p in params:
        p.grad = shard.summed(torch.zeros_like(p) if p.grad is None else p.grad)
    norm = shard.full(torch.nn.utils.clip_grad_norm_(params, grad_clip)).item()
    if not math.isfinite(norm):
        raise UserError(f"the norm of the gradient is {norm}")
    opt.step()
    opt.zero_grad()
    return norm

def supervised_fit(name, module, losses, steps, lr, grad_clip):
    """Supervised training: `steps` optimizer steps, each on the sum of the loss terms that
    `losses(step)` yields. The learning rate rises for 30 steps and falls linearly to 0."""
    opt, report = new_optimizer([module], lr), show.progress(name, steps)
    module.train()
    for step in range(steps):
        if machine.stop_asked():
            raise machine.Stopped(f"in the {name}, which will begin again")
        scale_rates(opt, min(1 - step / steps, (step + 1) / 30))
        total = torch.zeros((), device=opt.param_groups[0]["params"][0].device)
        for loss in losses(step):
            loss.backward()
            total += loss.detach()
        optimizer_step(opt, grad_clip)
        tenth = (step + 1) % max(1, steps // 10) == 0
        report(step + 1, f"loss {machine.all_reduce(total).item():.3f}  ", tenth)
    module.eval()

"""On-policy distillation (GKD, arXiv 2306.13649; MiniLLM, 2306.08543; Thinking Machines, 2025): the
student samples, and the advantage of a token is log pi_teacher - log pi_student, a sample of minus
the reverse KL at that token; no later token counts. The teacher is the model in the folder TEACHER.
The task's reward is only logged, and `kl` is the KL to the teacher.
"""
from dataclasses import replace

import torch

import grpo
from data import UserError
from grpo import new_agent as of_student
from grpo import rollout as of_task
from run import setup

SETTINGS = dict(baseline="none", adv_scale="none", kl="none", loss_mean="token",
                clip_low=1e9, clip_high=1e9)
FIXED = ["baseline", "adv_scale", "kl", "supervision", "reward"]
TEACHER = "out/arithmetic"


def tokens(encoding):
    known = encoding.known - encoding.unmade.keys()
    return encoding.unmade | {i: encoding.decode_single_token_bytes(i) for i in known}


def new_agent(cfg, task, encoding, policy, saved=None):
    agent = of_student(cfg, task, encoding, policy, saved)
    _, its_encoding, agent.teacher = setup.trained_model(replace(cfg, init=TEACHER))
    larger = policy.cfg.vocab_size > agent.teacher.cfg.vocab_size
    if larger or tokens(its_encoding) != tokens(encoding):
        raise UserError(f"{TEACHER}: the teacher's vocabulary is not the student's")
    return agent


def rollout(agent, problems, rng):
    batch, stats = of_task(agent, problems, rng)
    batch.ref_logp, _ = grpo.logps(agent.teacher, batch, agent.cfg)
    batch.adv = torch.where(batch.mask, batch.ref_logp - batch.logp, 0)
    stats.pop("dead_groups", None)          # groups do not matter
    return batch, stats


grpo.new_agent = new_agent
grpo.rollout = rollout

"""The constants that this repository's claims rest upon, by source: defaults, the rows of ALGOS, the tasks' settings."""
import dataclasses
from types import SimpleNamespace

import pytest
import torch

import data.arithmetic as arithmetic
import data.countdown as countdown
import data.gsm8k as gsm8k
import grpo
import reward
from data import UserError, chat
from data.tokenizer import byte_encoding
from grpo import Config, make_config
from run import config, passes, pretrained, report, setup

# DeepSeekMath, arXiv 2402.03300, 4.2: "the learning rate of the policy model as 1e-6 and the KL
# coefficient as 0.04. For each question, we sample 64 outputs. The max length is set to 1024, and
# the training batch size is 1024. The policy model only has a single update following each
# exploration stage."
PAPER = dict(
    lr=1e-6, beta=0.04, group=64, max_new=1024, prompts=1024 // 64, epochs=1, minibatches=1,
    supervision="outcome", baseline="group", adv_scale="group",                 # 4.1.2
    ratio="token", loss_mean="sequence", kl="loss", estimator="k3",              # eq. 3 and 4
    iterations=1, reward="rule")
PPO = dict(                     # arXiv 1707.06347; of language models, Ziegler et al. 2019
    clip_low=0.2, clip_high=0.2, lam=0.95, critic="shared")
OURS = dict(
    task="arithmetic", task_args={}, algo="grpo", init="", chat="auto", system="", out="",
    seed=1, steps=100, eval_every=0, held_out=0, samples=8, save_every=10, temperature=1.0,
    micro_tokens=0, recompute=False, half_life=0, n_layer=2,
    n_embd=256, warm_steps=1500, warm_lr=1.2e-3, device="auto",
    dtype="auto", compile=False, cache="auto", shard=False, max_turns=8)

WITHOUT_A_CLIP = dict(clip_low=1e9, clip_high=1e9)
ROWS = {                                        # what differs from GRPO
    "grpo": {},
    "reinforce": dict(baseline="none", adv_scale="none", kl="none", loss_mean="constant", **WITHOUT_A_CLIP),
    "a2c": dict(baseline="value", adv_scale="batch", kl="none", **WITHOUT_A_CLIP),
    # PPO of a language model: KL in the reward (Ziegler et al. 2019), whitened advantages
    "ppo": dict(baseline="value", adv_scale="batch", kl="reward", estimator="k1"),
    # arXiv 2402.14740: REINFORCE on whole completions, the mean of the others as the baseline
    "rloo": dict(baseline="leave-one-out", adv_scale="none", kl="reward", estimator="k1", loss_mean="constant",
                 **WITHOUT_A_CLIP),
    # arXiv 2503.20783: neither 1/|o| nor the std; no KL
    "dr_grpo": dict(adv_scale="none", kl="none", loss_mean="constant"),
    # arXiv 2507.18071, 5.1: left and right clipping ranges 3e-4 and 4e-4, of the sequence's ratio; its authors use no KL
    "gspo": dict(ratio="sequence", clip_low=3e-4, clip_high=4e-4, kl="none")}

LARGE = dict(steps=500, group=16, max_new=384, minibatches=2, save_every=50)
TASKS = {                                       # what differs from Config
    "arithmetic": dict(task_args={"difficulty": 2}, steps=24, prompts=32, group=16, max_new=64, lr=1e-4, minibatches=2),
    "countdown": dict(task="countdown", task_args={"difficulty": 3}, **LARGE),
    "guess": dict(task="guess", prompts=32, group=16, max_new=32, lr=3e-4, minibatches=2, kl="none", n_embd=128),
    "gsm8k": dict(task="gsm8k", task_args={"train": "", "test": "", "longest": 0}, **LARGE),
    "sums": dict(task="sums", task_args={"difficulty": 1}, group=16, max_new=24, lr=3e-5, half_life=25, kl="none", micro_tokens=4096,
                 save_every=25)}


def difference(cfg, base):
    """The fields of a Config that are not those of another."""
    return {name: x for name, x in vars(cfg).items() if x != getattr(base, name)}


def test_the_defaults_are_those_of_the_paper():
    assert vars(Config()) == PAPER | PPO | OURS
    assert len(PAPER | PPO | OURS) == len(PAPER) + len(PPO) + len(OURS)


def test_each_algorithm_differs_from_grpo_in_what_its_paper_says():
    assert grpo.ALGOS.keys() == ROWS.keys()
    for algo, row in ROWS.items():
        row = row if algo == "grpo" else row | {"algo": algo}
        assert difference(make_config(algo=algo), make_config()) == row, algo
        assert difference(make_config(**config.read(Config, "", ["--algo", algo])[1]), make_config()) == row, algo
    assert difference(make_config(reward="model"), make_config()) == dict(reward="model", adv_scale="none")


@pytest.mark.parametrize("task", TASKS)
def test_each_task_has_its_own_settings(task):
    assert difference(make_config(task=task, init=""), Config()) == TASKS[task]
    assert bool(make_config(task=task).init) is (task == "arithmetic")      # data/warm_start


def test_a_new_model_is_the_one_of_the_readme():
    """1.9 million parameters; RoPE's base is 10000, and RMSNorm's epsilon 1e-5."""
    policy = pretrained.new_model(make_config(), byte_encoding(), 6)
    assert dataclasses.asdict(policy.cfg) == dict(
        vocab_size=257, n_layer=2, n_head=8, n_kv_head=1, n_embd=256, n_inner=1024, block_size=128, head_size=32,
        positions="rope", rope_theta=10000.0, rope_inv_freq=(), rope_scale=1.0, norm="rms", norm_eps=1e-5,
        mlp="swiglu", bias="none", qk_norm=False, tied=True)
    assert f"{sum(p.numel() for p in policy.parameters()) / 1e6:.1f}" == "1.9"
    assert policy.norm.eps == policy.layers[0].input_layernorm.eps == 1e-5
    turns = torch.atan2(policy.sin[1, 0], policy.cos[1, 0])       # of position 1: of each pair twice, first negated
    torch.testing.assert_close(turns, torch.tensor([-1.0, 1.0]).repeat_interleave(16) * 10000.0 ** (-torch.arange(16).repeat(2) / 16))
    std = policy.embed_tokens.weight.std().item()
    assert std == pytest.approx((2 / (5 * 256)) ** 0.5, rel=0.02)
    for layer in policy.layers:             # the branches that add up shrink with the depth
        assert layer.mlp.down_proj.weight.std().item() == pytest.approx(std / 2, rel=0.02)
        assert layer.self_attn.o_proj.weight.std().item() == pytest.approx(std / 2, rel=0.02)


def test_what_a_file_may_take():
    """A template's seconds, bytes and characters; what a page shows; a start's shares of them."""
    assert (chat.SECONDS, chat.MEMORY, chat.LONGEST) == (10, 2 ** 30, 100_000)
    assert report.MOST == 20_000_000


def test_what_the_readme_says_of_the_people_and_the_problems():
    """53 % only guess, one number in 2000 is a slip, 500 problems are held out."""
    assert (arithmetic.GUESS, arithmetic.SLIP, arithmetic.HELD_OUT) == (0.53, 0.0005, 500)
    assert (countdown.DRAWS, countdown.HELD_OUT) == (60000, 500)
    right = SimpleNamespace(prompt="", numbers=(1, 2), target=3, answer="3")
    for task, text in ((countdown, "1+2"), (gsm8k, "3")):       # TinyZero's: a tenth for the tags
        assert task.reward(right, f"<answer>{text}</answer>") == {"correct": 1.0, "format": 0.1}
        assert task.reward(right, "<answer>4</answer>") == {"correct": 0.0, "format": 0.1}
        assert task.reward(right, text) == {"correct": 0.0, "format": 0.0}


def test_other_constants_that_are_claims():
    assert passes.MISMATCH == {None: (1e-3, 1e-4), torch.bfloat16: (2.0, 0.1)}            # troubleshooting
    assert passes.most_logits(torch.device("cpu")) * 4 == 256 * 2 ** 20       # bytes of float32
    assert passes.MICRO_TOKENS == 2048
    for name, least in dict(group=1, seed=0, steps=0, warm_steps=0, temperature=0.001, prompts=1, lr=0).items():
        make_config(**{name: least})
        with pytest.raises(UserError, match=f"--{name} must be at least {least}, got"):
            make_config(**{name: least - 1})
    for name, most in dict(lam=1, samples=1024).items():
        make_config(**{name: most})
        with pytest.raises(UserError, match=f"--{name} must be at most {most}, got"):
            make_config(**{name: most + 1})
    assert (grpo.GAMMA, grpo.VALUE_COEF, grpo.VALUE_CLIP, grpo.GRAD_CLIP) == (1.0, 0.1, 0.2, 1.0)
    assert (reward.CHOICES, reward.TRUNCATED_REWARD, reward.FIT_STEPS, reward.FIT_LR, setup.WARM_BATCH, passes.GRAD_CLIP) == (4, 0, 64, 1e-3, 48, 1.0)
    assert grpo.bounded(torch.tensor([-99.0, 19.0, 99.0])).tolist() == [-20, 19, 20]
    scores = torch.tensor([1.0, 1 + 3e-6] * 2), torch.tensor([1.0, 1 + 1e-6] * 2)
    ends = torch.ones(4, 1, dtype=torch.bool)
    assert [grpo.group_scores(x[:, None], ends, Config(group=4))[1].item() for x in scores] == [False, True]   # spread below 1e-6 of the mean

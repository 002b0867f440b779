"""Sampling: what is recorded is what was sampled, and the trainer agrees."""
import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_model

from data import UserError
from data.tokenizer import byte_encoding
from grpo import sample
from model import token_logps
from run import caches
from run.caches import draw, inverse_cdf

PROMPTS = [[49, 50, 61], [51], [52, 53, 54, 55, 61, 10]]
STOP = {256}


def shared(model):
    model.kv_cache = "shared"
    return model


def uniform(rows, n, seed=0):
    return torch.rand(rows, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("positions", ["rope", "learned"])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_sampler_and_trainer_agree(temperature, positions):
    """At any temperature, for prompts of unequal length, while finished rows leave the batch."""
    model = tiny_model(positions=positions).double()        # so that no processor's rounding decides
    stop = set(range(0, 257, 9))            # many: rows end all the time
    b = sample(model, PROMPTS, 8, [20] * 3, temperature, stop, uniform(24, 20))
    logp, _ = token_logps(model, b.ids, b.mask, temperature)
    torch.testing.assert_close(logp, b.logp, rtol=0, atol=2e-5)
    assert not b.mask.all(1).any() and (b.logp[b.mask] < 0).all() and (b.logp[~b.mask] == 0).all()
    assert len(set(b.mask.sum(1).tolist())) > 3


def test_a_row_does_not_depend_on_the_others():
    """Dropping finished rows from the decode batch changes nothing."""
    model, u = tiny_model(), uniform(24, 20)
    stop = set(range(0, 257, 9))
    together = sample(model, PROMPTS, 8, [20] * 3, 1.0, stop, u)
    for row in (0, 7, 11, 23):
        alone = sample(model, [PROMPTS[row // 8]], 1, [20], 1.0, stop, u[row:row + 1])
        assert (together.ids[row][together.mask[row]].tolist() == alone.ids[0][alone.mask[0]].tolist())
        assert together.finished[row] == alone.finished[0]


@pytest.mark.slow
def test_sampled_frequencies_are_the_probabilities():
    """Chi-square of 20,000 first tokens against the exact distribution, at temperature 0.8."""
    model, n = tiny_model(), 20_000
    p = (model.head(model(torch.tensor([PROMPTS[0]])))[0, -1].double() / 0.8).softmax(-1).detach()
    b = sample(model, PROMPTS[:1], n, [1], 0.8, STOP, uniform(n, 1))
    seen = torch.bincount(b.ids[:, 3], minlength=257)
    common = p * n >= 5
    observed = torch.cat((seen[common], seen[~common].sum()[None])).double()
    expected = torch.cat((p[common], p[~common].sum()[None])) * n
    freedom = len(observed) - 1
    z = (((observed - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5
    assert freedom > 20 and abs(z) < 4


def test_no_token_of_probability_zero():
    """u = 0 and u just under 1 must still pick tokens that can be."""
    model = tiny_model()
    model.head = lambda h: torch.full((len(h), 257), -float("inf")).index_fill(1, torch.tensor([5, 9]), 0.0)
    u = torch.tensor([[0.0], [1 - 2 ** -53]], dtype=torch.float64)
    assert sample(model, PROMPTS[:1], 2, [1], 1.0, STOP, u).ids[:, 3].tolist() == [5, 9]


@pytest.mark.parametrize("cache", caches.CACHES)
def test_greedy_is_the_argmax_of_the_whole_prefix(cache):
    """Without numbers to draw with, whatever the temperature."""
    model = tiny_model()
    model.kv_cache = cache
    b = sample(model, PROMPTS, 1, [6] * 3, 1.6, STOP)
    for prompt, ids, mask in zip(PROMPTS, b.ids, b.mask):
        row = list(prompt)
        for token in ids[mask].tolist():
            assert token == model.head(model(torch.tensor([row])))[0, -1].argmax()
            row.append(token)


def test_layout_prompt_completion_padding():
    b = sample(tiny_model(), PROMPTS, 2, [5] * 3, 1.0, STOP, uniform(6, 5))
    for i, (ids, mask) in enumerate(zip(b.ids.tolist(), b.mask.tolist())):
        prompt = PROMPTS[i // 2]
        n = sum(mask)
        assert ids[:len(prompt)] == prompt
        assert mask == [False] * len(prompt) + [True] * n + [False] * (len(mask) - len(prompt) - n)


def scripted(tokens):
    """A model whose head gives the next token of a script, whatever it reads."""
    model = tiny_model()
    script = iter(tokens)
    model.head = lambda h: torch.nn.functional.one_hot(torch.tensor([next(script)] * len(h)), 257) * 100.0
    return model


@pytest.mark.parametrize("script, length, finished", [
    ([7, 8, 256], 3, True),         # stops exactly at the limit
    ([7, 256, 8], 2, True),         # the end token is sampled, so it is in the mask
    ([7, 8, 9], 3, False),          # cut off: not to be guessed from the last token
    ([7, 10, 8], 2, True),          # a second stop token
    ([256], 1, True)])
def test_finished_is_explicit(script, length, finished):
    b = sample(scripted(script), [[1, 2]], 1, [3], 1.0, {256, 10})
    assert b.ids[0][b.mask[0]].tolist() == script[:length]
    assert b.finished.tolist() == [finished]


def test_end_tokens_in_the_prompt_are_prompt():
    """Padding is never found by its value: 0 and 256 mean nothing special in a prompt."""
    model, odd = tiny_model(), [[256, 0, 65, 0], [256]]
    b = sample(model, odd, 3, [6, 6], 1.0, STOP, uniform(6, 6))
    for row in range(6):
        prompt = odd[row // 3]
        assert b.ids[row, :len(prompt)].tolist() == prompt and not b.mask[row, :len(prompt)].any()
    torch.testing.assert_close(token_logps(model, b.ids, b.mask, 1.0)[0], b.logp, rtol=0, atol=2e-5)


def test_only_the_sampled_column_and_later_ones_move():
    model = tiny_model()
    b = sample(model, [[49, 50, 61]], 1, [6], 1.0, set())
    ids = b.ids.clone()
    ids[0, 5] += 1
    moved = token_logps(model, b.ids, b.mask, 1.0)[0] != token_logps(model, ids, b.mask, 1.0)[0]
    assert moved[0].tolist() == [False] * 5 + [True] * 4


def test_the_completion_begins_at_start():
    b = sample(tiny_model(), PROMPTS, 2, [5] * 3, 1.0, STOP, uniform(6, 5))
    assert b.start.tolist() == [3, 3, 1, 1, 6, 6]
    assert [int(on.nonzero()[0]) for on in b.mask] == b.start.tolist()


@pytest.mark.parametrize("cache", caches.CACHES)
@pytest.mark.parametrize("limits", [[5, 11, 8], [1, 1, 12], [12, 3, 1]])
def test_each_prompt_may_have_a_limit_of_its_own(limits, cache):
    """A row is what it is alone, and the context need not hold the longest prompt with the largest limit."""
    prompts = [[65, 66, 67, 68, 69, 70], [71, 72], [73] * 4]
    model = tiny_model(block_size=max(len(p) + n for p, n in zip(prompts, limits))).double()
    model.kv_cache, u = cache, uniform(6, max(limits))
    b = sample(model, prompts, 2, limits, 1.0, {10}, u)
    for i in range(6):
        prompt, limit = prompts[i // 2], limits[i // 2]
        alone = sample(model, [prompt], 1, [limit], 1.0, {10}, u[i:i + 1, :limit])
        assert b.ids[i][b.mask[i]].tolist() == alone.ids[0][alone.mask[0]].tolist()
        assert b.mask[i].sum() == limit or b.finished[i]
        assert b.finished[i] == alone.finished[0]
        torch.testing.assert_close(b.logp[i][b.mask[i]], alone.logp[0][alone.mask[0]])


def test_a_prompt_that_does_not_fit():
    with pytest.raises(UserError, match="^65 tokens do not fit a context of 64$"):
        sample(tiny_model(), [[1] * 65], 1, [1], 1.0, ())
    assert sample(tiny_model(), [[1] * 60], 1, [4], 1.0, ()).mask.sum() == 4        # the context of 64 is full
    with pytest.raises(UserError, match="empty"):
        byte_encoding().encode_prompt("")


# ------------------------------------------------------------------------------ drawing of a token

def assert_drawn_where_the_sum_passes(token, p, u):
    """Tokens (r,) against the float64 sums of p (r, V): none of probability 0, and each where they pass u, up to 3e-6."""
    p = p.double()
    cdf, drawn = p.cumsum(-1) / p.sum(-1, keepdim=True), (torch.arange(len(p)), token)
    assert (p[drawn] > 0).all()
    assert (cdf[drawn] > u - 3e-6).all() and (cdf[drawn] - p[drawn] < u + 3e-6).all()


@pytest.mark.parametrize("V", [5, 256, 257, 1000, 1024, 49152])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_a_token_is_where_the_whole_distribution_passes_u(V, temperature):
    """Against a float64 sum; u in the middle of the distribution, at its ends, and at random."""
    logits = 3 * torch.randn(40, V, generator=torch.Generator().manual_seed(V)) / temperature
    logits[::2, V // 3:V // 2] = -float("inf")
    u = torch.rand(40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    u[:4] = torch.tensor([0, 0, 1 - 2 ** -53, 1 - 2 ** -53])
    assert_drawn_where_the_sum_passes(draw(logits.softmax(-1), u.float())[0], logits.double().softmax(-1), u)


ENDS = torch.tensor([0, 2 ** -25, 1 - 2 ** -24, 1], dtype=torch.float64)


@pytest.mark.parametrize("V", [1024, 1000])
@pytest.mark.parametrize("zeros", [(0, 128), (0, 384), (384, 640), (896, 1024), (640, 1024), (0, 0)])
def test_probabilities_of_0_are_never_drawn(V, zeros):
    """A third of them, and whole parts of 128 at the beginning, in the middle and at the end."""
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(400, V, generator=generator) ** 8        # of very different sizes
    p[torch.rand(400, V, generator=generator) < 1 / 3] = 0
    p[:, zeros[0]:zeros[1]] = 0
    p /= p.sum(-1, keepdim=True)
    u = torch.cat((ENDS.repeat(25), torch.rand(300, generator=generator, dtype=torch.float64)))
    assert_drawn_where_the_sum_passes(draw(p, u.float())[0], p, u)


def test_two_levels_draw_as_one_does_up_to_rounding(monkeypatch):
    """Where they differ, u is that of the boundary between the two tokens. No sum is over more than 128 numbers."""
    generator, shapes = torch.Generator().manual_seed(0), []
    p = (3 * torch.randn(2000, 1024, generator=generator)).softmax(-1)
    u = torch.rand(2000, generator=generator)
    monkeypatch.setattr(caches, "inverse_cdf", lambda p, u: (shapes.append(p.shape), inverse_cdf(p, u))[1])
    (two, _), (one, _) = draw(p, u), inverse_cdf(p, u)
    assert shapes == [(2000, 8), (2000, 128)]
    other = (two != one).nonzero()[:, 0]
    boundary = p.double().cumsum(-1)[other, torch.minimum(one, two)[other]]
    assert len(other) < 10 and ((boundary - u[other]).abs() < 1e-6).all() and one.unique().numel() > 500


def test_how_far_the_sum_exceeds_u():
    p, u = torch.tensor([[0.25, 0.0, 0.5, 0.25]] * 5), torch.tensor([0.0, 0.125, 0.25, 0.5, 0.9375])
    i, over = inverse_cdf(p, u)
    assert i.tolist() == [0, 0, 2, 2, 3] and over.dtype == torch.float64
    torch.testing.assert_close(over, torch.tensor([0.25 - 2.0 ** -25, 0.125, 0.5, 0.25, 0.0625], dtype=torch.float64),
                               rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("V", [1000, 1024])
def test_every_token_has_its_share_over_a_grid_of_u(V):
    """100,000 equal shares, with steps of 1e-5: each token gets as many as its probability says."""
    p = torch.randn(1, V, generator=torch.Generator().manual_seed(0)).softmax(-1)
    u = (torch.arange(10 ** 5, dtype=torch.float64) + 0.5) / 10 ** 5
    seen = torch.cat([draw(p.expand(1000, -1), part.float())[0] for part in u.split(1000)])
    assert (seen.diff() >= 0).all() and (torch.bincount(seen, minlength=V) - 1e5 * p[0].double()).abs().max() < 1.2


@pytest.mark.parametrize("V", [3, 128])
def test_a_u_of_0_takes_the_first_token_that_is_not_nearly_impossible(V):
    """Of 0 or of 1e-9: a random number in float32 is 0 once in 16 million times."""
    p = torch.zeros(1, V)
    p[0, :3] = torch.tensor([0.0, 0.25, 0.75])
    assert [draw(p, torch.tensor([u]))[0].item() for u in (0.0, 1.0)] == [1, 2]      # 1 - 2 ** -53 is 1 in float32
    p[0, :3] = torch.tensor([1e-9, 1.0, 1e-9])
    assert [draw(p, torch.tensor([u]))[0].item() for u in (0.0, 1.0)] == [1, 1]


def exact(model, b, temperature):
    """The distributions from which the tokens of a Batch were sampled, (n, V), in float64 and each from its whole row."""
    h = torch.cat([model(row[None])[0, :-1][on[1:]] for row, on in zip(b.ids, b.mask)])
    return (8 * F.linear(h, model.embed_tokens.weight) / temperature).log_softmax(-1)


@pytest.mark.parametrize("cache", caches.CACHES)
@pytest.mark.parametrize("temperature", [0.4, 1.0, 1.6])
@torch.no_grad()
def test_recorded_log_probabilities_are_exact_at_any_scale_and_temperature(temperature, cache):
    """Those of sampled and of greedy tokens, which are the most likely ones; logits spread by 20 and more."""
    model = tiny_model().double()
    model.kv_cache = cache
    head, model.head = model.head, lambda h: 8 * head(h)
    for u in (uniform(12, 12), None):
        b = sample(model, PROMPTS, 4, [12] * 3, temperature, STOP, u)
        want, token = exact(model, b, temperature), b.ids[b.mask]
        assert want.std(-1).mean() * temperature > 20 and (u is None or (b.logp[b.mask] < -0.1).sum() > 10)
        torch.testing.assert_close(b.logp[b.mask].double(), want.gather(1, token[:, None])[:, 0], rtol=0, atol=2e-5)
        assert torch.equal(token, want.argmax(-1)) == (u is None)


def ending(at, prompts, group=1):
    """A Batch whose row i samples the token 9 up to its turn at[i], and there 256: the model finds both as likely, and
    numbers below and above a half choose. Also the states and the slots of the cache that it is given turn by turn."""
    model, seen = shared(tiny_model()), []
    forward = model.forward

    def watched(ids, pos, cache):
        seen.append((len(ids), cache.size(4)))
        return forward(ids, pos, cache)
    model.forward = watched
    model.head = lambda h: torch.full((len(h), 257), -float("inf")).index_fill(1, torch.tensor([9, 256]), 0.0)
    u = torch.where(torch.arange(9) == torch.tensor(at)[:, None], 0.9, 0.1).double()
    return sample(model, prompts, group, [9] * len(prompts), 1.0, STOP, u), seen


def test_states_leave_once_a_tenth_of_them_is_not_needed():
    """Of 20 rows one ends at the first turn and its state stays; with the second, at the next, both leave."""
    at = [0, 1] + [4] * 2 + [6] * 16
    b, seen = ending(at, [[i, 2] for i in range(20)])
    assert b.mask.sum(1).tolist() == [n + 1 for n in at] and b.finished.all()
    assert [states for states, _ in seen] == [20, 20, 18, 18, 18, 16, 16]


def test_rows_that_drew_alike_share_a_state():
    """It is computed once for all of them, from the prompt to where they part, and is in each of them the same."""
    b, seen = ending([2, 5, 5, 3, 3, 3], [[1, 2], [3]], 3)
    assert [states for states, _ in seen] == [2] * 6            # one alone would be compiled anew
    assert b.mask.sum(1).tolist() == [3, 6, 6, 4, 4, 4]
    model, counts = shared(tiny_model()), []
    forward = model.forward
    model.forward = lambda ids, pos, cache: (counts.append(len(ids)), forward(ids, pos, cache))[1]
    u = uniform(1, 12).repeat(8, 1)
    u[4:, 5] = torch.tensor([0.1, 0.3, 0.6, 0.9])       # rows 4 to 7 part there, and then each goes on alike
    b = sample(model, PROMPTS[:1], 8, [12], 1.0, set(), u)
    texts = [tuple(row[3:9].tolist()) for row in b.ids]
    assert len(set(texts[:4])) == 1 and len(set(texts)) == 5
    assert counts == [1] * 6 + [5] * 6
    torch.testing.assert_close(token_logps(tiny_model(), b.ids, b.mask, 1.0)[0], b.logp, rtol=0, atol=2e-5)


def test_states_keep_their_numbers_while_one_is_not_needed():
    """Of 20 states, which all stay, the fourth is of a row at its limit; those after it read their own keys still."""
    prompts, limits, model = [[i, 2] for i in range(20)], [6] * 3 + [1] + [6] * 16, tiny_model()
    plain, states, forward = sample(model, prompts, 1, limits, 1.0, set(), uniform(20, 6)), [], model.forward
    model.forward = lambda ids, pos, cache: (states.append(len(ids)), forward(ids, pos, cache))[1]
    b = sample(shared(model), prompts, 1, limits, 1.0, set(), uniform(20, 6))
    assert states == [20] * 6 and b.mask.sum(1).tolist() == limits
    assert torch.equal(b.ids, plain.ids)
    torch.testing.assert_close(b.logp, plain.logp, rtol=0, atol=2e-5)


@pytest.mark.parametrize("cache", ["shared", "static"])
def test_ids_that_differ_by_powers_of_two_are_told_apart(cache):
    """Cut to 16 bits, or packed with a state's number into one, some would be the same token: in a prompt or in what follows."""
    few = torch.tensor([5, 5 + 2 ** 8, 5 + 2 ** 16])
    model = tiny_model(vocab_size=2 ** 16 + 128, n_layer=1)         # divisible by 128: a part is drawn first
    weight = model.embed_tokens.weight[few].T / 20          # logits of these three alone
    model.head = lambda h: torch.full((len(h), 2 ** 16 + 128), -float("inf")).index_copy(1, few, h @ weight)
    prompts, u = [[5 + 2 ** 16, 40_000, 5], [5, 40_000, 5]], uniform(12, 3)
    u[:, 0] = torch.tensor([0.1, 0.5, 0.9]).repeat(4)
    plain = sample(model, prompts, 6, [3, 3], 1.0, set(), u)
    model.kv_cache = cache
    b = sample(model, prompts, 6, [3, 3], 1.0, set(), u)
    assert b.ids[:, :3].tolist() == [prompts[i // 6] for i in range(12)]
    assert b.ids[:, 3].tolist() == few.repeat(4).tolist()           # all of them from each prompt's state
    assert torch.equal(b.ids, plain.ids) and b.ids[:, 4:].unique().tolist() == few.tolist()
    torch.testing.assert_close(b.logp, plain.logp, rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_every_row_is_what_it_is_alone_however_rows_part_and_end(temperature):
    """Random trees: many rows of few prompts, over a head with few likely tokens, some of which end a row."""
    model, u = tiny_model().double(), uniform(40, 16, seed=3)
    head, model.head = model.head, lambda h: 4 * head(h)
    b = sample(shared(model), PROMPTS[:2], 20, [16, 16], temperature, set(range(0, 257, 7)), u)
    model.kv_cache = "plain"
    assert len(set(b.mask.sum(1).tolist())) > 3
    for row in range(40):
        alone = sample(model, [PROMPTS[row // 20]], 1, [16], temperature, set(range(0, 257, 7)), u[row:row + 1])
        assert b.ids[row][b.mask[row]].tolist() == alone.ids[0][alone.mask[0]].tolist()
        torch.testing.assert_close(b.logp[row][b.mask[row]], alone.logp[0][alone.mask[0]], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("longest", [1, 14, 15, 16, 17])
def test_the_cache_that_is_read_holds_just_what_was_written(longest):
    """Its slots a multiple of 16."""
    _, seen = ending([3], [[1] * longest])
    assert [slots for _, slots in seen] == [16 if n <= 16 else 32 for n in range(longest, longest + 4)]


def test_a_batch_is_no_wider_than_its_longest_row_and_padded_with_0():
    b, _ = ending([2], [[7, 8]])
    assert b.ids.tolist() == [[7, 8, 9, 9, 256]] and b.ids.shape == b.mask.shape == b.logp.shape
    b = sample(scripted([5, 6]), [[7, 8, 9, 10], [11]], 1, [2, 2], 1.0, STOP)
    assert b.ids.tolist() == [[7, 8, 9, 10, 5, 6], [11, 5, 6, 0, 0, 0]]

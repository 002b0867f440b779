"""Episodes of several turns: the policy speaks, the task's `reply` answers, the policy goes on."""
from data import call, need, of
from data.tokenizer import decode

LONGEST = 100_000       # characters of a reply that may fit: a longer one is not tokenized

class Episodes:
    """The `turns` of each row: texts, the policy's and the environment's in alternation. Called as
    the `reply` of `grpo.sample`; its own reply is the task's. begun: the column of a turn."""

    def __init__(self, reply, encoding, max_turns, problems, begun):
        self.reply, self.encoding, self.max_turns = reply, encoding, max_turns
        self.problems, self.begun = problems, begun
        self.turns = [[] for _ in problems]

    def __call__(self, row, ids, left):
        """The ids of the reply to the turn that ends a row's `ids`, and whether the episode is
        over. No ids and False: the row is cut off, by the `left` tokens or --max_turns."""
        turns = self.turns[row]
        turns.append(decode(self.encoding, ids[self.begun[row]:]))
        text = checked_reply(self.reply, self.problems[row], turns)
        used_up = len(turns[::2]) >= self.max_turns
        if text and (used_up or len(text) > LONGEST):
            return [], False
        answer = self.encoding.encode_reply(text) if text else []
        if not answer:
            return [], True
        if len(answer) >= left:  # the policy could not go on
            return [], False
        turns.append(text)
        self.begun[row] = len(ids) + len(answer)
        return answer, False

    def go_on(self, rows, ids, judged):
        """Begins rows, a range, amid an episode, with ids behind their prompt, of which those
        `judged` are the policy's. The task is asked for its replies again."""
        turns, begun = [], 0
        for t in range(1, len(ids) + 1):
            if judged[t - 1] and t < len(ids) and not judged[t]:    # a turn ends, a reply begins
                turns.append(decode(self.encoding, ids[begun:t]))
                turns.append(checked_reply(self.reply, self.problems[rows[0]], turns))
            if not judged[t - 1]:
                begun = t
        for row in rows:
            self.turns[row] = [*turns]
            self.begun[row] += begun

    def all_turns(self, said):
        """The turns of each row, given the ids that the policy said; part of one if cut off."""
        for turns, ids in zip(self.turns, said):
            if len(turns) % 2 == 0:
                ends = [i for i, token in enumerate(ids) if token in self.encoding.stop]
                begun = ends[-1] + 1 if ends else 0
                turns.append(decode(self.encoding, ids[begun:]))
        return self.turns

def texts(encoding, batch, episodes=None):
    """What was said in each row of a Batch: a text or, with Episodes, a list of turns."""
    rows = zip(batch.ids.cpu(), batch.judged.cpu())
    said = [ids[judged].tolist() for ids, judged in rows]
    if episodes is None:
        return [decode(encoding, ids) for ids in said]
    return episodes.all_turns(said)

def spoken(completion):
    """What the policy said in a completion, a text or a list of turns."""
    return completion if isinstance(completion, str) else "".join(completion[::2])

def checked_reply(reply, problem, turns):
    """A task's reply; UserError if it is no text."""
    what = f"the reply to {of(problem)}"
    text = call(reply, what, problem, [*turns])
    need(isinstance(text, str | None), what, "be a string or None", text)
    return text

def demonstration(task, problem, rng):
    """A task's demonstration: a text or, if the task replies, a list of turns, the policy's first
    and last, with the task's replies. UserError for anything else."""
    what = f"the demonstration of {of(problem)}"
    shown = call(task.demonstration, what, problem, rng)
    if not hasattr(task, "reply"):
        need(isinstance(shown, str), what, "be a string", shown)
        return shown
    are_texts = isinstance(shown, list) and all(isinstance(turn, str) for turn in shown)
    need(are_texts and len(shown) % 2 == 1, what,
         "be a list of turns that begins and ends with one of the policy's", shown)
    for i in range(1, len(shown), 2):
        said = checked_reply(task.reply, problem, shown[:i])
        need(said == shown[i], what, f"have the reply {said!r:.200}, as the task", shown[i])
    return shown

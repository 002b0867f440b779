"""Episodes of several turns: the policy speaks, the task's `reply` answers, the policy goes on."""
from data import UserError, call, of
from data.tokenizer import decode

LONGEST = 100_000       # characters of a reply that may fit: a longer one is not tokenized


class Episodes:
    """What is said in each row of a rollout: `turns`, for each row a list of texts, the policy's
    and the environment's in alternation. It is the `reply` of `grpo.sample`.

    reply(problem, turns): what the environment says next; None or "" if the episode is over.
    problems: that of each row. begun: for each row the column at which its turn begins.
    """

    def __init__(self, reply, encoding, max_turns, problems, begun):
        self.reply, self.encoding, self.max_turns = reply, encoding, max_turns
        self.problems, self.begun = problems, begun
        self.turns = [[] for _ in problems]

    def __call__(self, row, ids, left):
        """The ids of the reply to a turn that has just ended, at the end of a row's `ids`, and
        whether the episode is over. No ids and False: the row is cut off, as the reply is not
        among the `left` tokens or --max_turns."""
        turns = self.turns[row]
        turns.append(decode(self.encoding, ids[self.begun[row]:]))
        text = checked_reply(self.reply, self.problems[row], turns)
        used_up = len(turns[::2]) >= self.max_turns
        if text and (used_up or len(text) > LONGEST):
            return [], False
        answer = self.encoding.encode_reply(text) if text else []
        if not answer:
            return [], True
        if len(answer) >= left:         # the policy could not go on
            return [], False
        turns.append(text)
        self.begun[row] = len(ids) + len(answer)
        return answer, False

    def go_on(self, rows, ids, judged):
        """Begins rows, a range, amid an episode: the ids that follow their prompt, and which of
        these are the policy's. The task is asked for its replies again."""
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
        """The turns of each row, given the ids that the policy said. A row that was cut off within
        a turn has that part of it as its last one."""
        for turns, ids in zip(self.turns, said):
            if len(turns) % 2 == 0:
                ends = [i for i, token in enumerate(ids) if token in self.encoding.stop]
                begun = ends[-1] + 1 if ends else 0
                turns.append(decode(self.encoding, ids[begun:]))
        return self.turns


def texts(encoding, batch, episodes=None):
    """What the policy said in each row of a Batch, as a text; of Episodes, the list of turns."""
    rows = zip(batch.ids.cpu(), batch.judged.cpu())
    said = [ids[judged].tolist() for ids, judged in rows]
    if episodes is None:
        return [decode(encoding, ids) for ids in said]
    return episodes.all_turns(said)


def spoken(completion):
    """What the policy said in a completion, which is a text or a list of turns."""
    return completion if isinstance(completion, str) else "".join(completion[::2])


def checked_reply(reply, problem, turns):
    """What a task replies; raises UserError, with the place, if that fails or is not a text."""
    what = f"the reply to {of(problem)}"
    text = call(reply, what, problem, [*turns])
    if not isinstance(text, str | None):
        raise UserError(f"{what} must be a string or None, not {text!r:.200}")
    return text


def demonstration(task, problem, rng):
    """A task's demonstration: a text or, if the task replies, a list of turns, from the policy's
    first to its last, with what the task does reply. Raises UserError for anything else."""
    what = f"the demonstration of {of(problem)}"
    shown = call(task.demonstration, what, problem, rng)
    if not hasattr(task, "reply"):
        if not isinstance(shown, str):
            raise UserError(f"{what} must be a string, not {shown!r:.200}")
        return shown
    are_texts = isinstance(shown, list) and all(isinstance(turn, str) for turn in shown)
    if not are_texts or len(shown) % 2 == 0:
        raise UserError(f"{what} must be a list of turns that begins and ends with one of the "
                        f"policy's, not {shown!r:.200}")
    for i in range(1, len(shown), 2):
        said = checked_reply(task.reply, problem, shown[:i])
        if said != shown[i]:
            raise UserError(f"{what} has the reply {shown[i]!r:.200} where the task says "
                            f"{said!r:.200}")
    return shown

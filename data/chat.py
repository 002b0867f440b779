"""The text around prompts and replies for a chat model, from the chat template in its folder. It is
a program, in Jinja's sandbox without access to the machine; but nothing stops an endless one."""
import json
import re
from dataclasses import dataclass
from datetime import datetime
from functools import partial

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from data import UserError

BARE = "; use --chat none to send bare prompts"
FAILURES = (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError,
            AttributeError, RuntimeError, SyntaxError, MemoryError)

# Placeholders: unusual text, so that a template that alters or repeats a message is noticed.
PROMPT, ANSWER, REPLY = (f'\ue000 The <{x}> & "{x}"\n\n  is \\ \u00e9\ue001' for x in "PAR")
THINKING = {"think": True, "no_think": False}    # enable_thinking, by --chat

@dataclass(frozen=True)
class Frame:
    """The text around a prompt and around a reply. A run keeps it: a template may have the date."""
    chat: str = ""          # as requested with --chat, or "" without a template
    system: str = ""        # as requested with --system
    before: str = ""        # the text before the prompt
    after: str = ""         # the text after it
    strips: bool = False    # the template strips the prompt
    end: str = ""           # the special token that ends the model's turn
    reply_before: str = ""  # the text before a reply, from the end of that turn
    reply_after: str = ""   # the text after it; both "": the template has no place for a reply

def frame_of(template, tokens, special, chat="auto", system=""):
    """The Frame of a template with the variables `tokens`; `special`: names of special tokens.
    Raises UserError if it fails, or does not support what is requested."""
    asked, padded = [("system", system)] if system else [], f"\n {PROMPT}\t\n"
    options = {"enable_thinking": THINKING[chat]} if chat in THINKING else {}
    if options and "enable_thinking" not in template:
        raise UserError(f"--chat {chat}: its chat template has no enable_thinking")
    try:
        render = renderer(template, dict(tools=None, documents=None) | tokens | options)
        before, *after = render(*asked, ("user", PROMPT)).split(PROMPT)
        shown = [x.join([before, *after]) for x in (padded, PROMPT)]
        if len(after) != 1 or (full := render(*asked, ("user", padded))) not in shown:
            raise UserError("its chat template must insert the prompt once, unchanged" + BARE)
        bare = render(("user", PROMPT))
        if system and (bare == shown[1] or any(name in system for name in special)):
            raise UserError("--system has a special token, or its chat template ignores it")
        answered = [*asked, ("user", PROMPT), ("assistant", ANSWER)]
        ended = render(*answered).partition(ANSWER)[2]
    except FAILURES as e:
        raise UserError(f"its chat template fails: {e!r:.200}{BARE}") from e
    end = min((name for name in special if name in ended), key=ended.index, default="")
    strips = full == shown[1]
    around = around_reply(template, render, answered, end, strips)
    return Frame(chat, system, before, after[0], strips, end, *around)

def around_reply(template, render, answered, end, strips):
    """The texts before and after a reply to a conversation, from the end of its last turn: as a
    message of a tool, if the template names that role, or else of the user. "" and "" if it
    refuses, alters the text, or frames a second reply in another way. Earlier turns stay as the
    model has read them, even where the template would leave out their thinking."""
    padded = f"\n {REPLY}\t\n"
    shown = REPLY if strips else padded
    for role in ["tool", "user"] if re.search("""['"]tool['"]""", template) else ["user"]:
        try:
            one = render(*answered, (role, REPLY))
            two = render(*answered, (role, padded), answered[-1], (role, padded))
        except FAILURES:
            continue
        before, *after = one.rpartition(ANSWER)[2].split(REPLY)
        same = two.rpartition(ANSWER)[2] == shown.join([before, *after])
        if same and len(after) == 1 and end in before:
            return before[before.index(end) + len(end):], after[0]
    return "", ""

def renderer(template, given):
    """A function that renders messages as transformers 5 would now, in Jinja's sandbox."""
    def refuse(why):
        raise jinja2.TemplateError(why)
    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                            extensions=["jinja2.ext.loopcontrols"])
    sandbox.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    sandbox.globals |= dict(raise_exception=refuse, strftime_now=datetime.now().strftime)
    # {% generation %} blocks only mark answers: replaced by statements without effect.
    page = sandbox.from_string(re.sub(r"({%[-+]?)\s*(end)?generation\b", r"\1 set _=0", template))
    def render(*messages):
        """The text of messages (role, text), up to where the assistant would answer."""
        return page.render(given, messages=[dict(role=role, content=x) for role, x in messages],
                           add_generation_prompt=messages[-1][0] != "assistant")
    return render

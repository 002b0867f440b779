"""How a prompt is framed for a model that was tuned to chat: as the template in its folder does."""
import json
import re
from dataclasses import dataclass
from datetime import datetime
from functools import partial

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from data import Fault

# What a template is filled with, to be found again: only if it was said once, and not altered.
PROMPT, ANSWER = (f'\ue000 The <{x}> & "{x}"\n\n  is \\ \u00e9\ue001' for x in "PA")


@dataclass(frozen=True)
class Frame:
    """What stands around a prompt. A run keeps its own, for a template may say the date."""
    chat: str = ""          # what was asked for: --chat, or "" where there is no template;
    system: str = ""        # --system;
    thinking: str = "auto"  # --thinking
    before: str = ""        # the text before the prompt
    after: str = ""         # the text after it
    strips: bool = False    # the template strips the prompt
    end: str = ""           # the special token that ends the model's turn

    def __post_init__(self):
        if [*map(type, vars(self).values())] != [*type(self).__annotations__.values()]:
            raise Fault("the frame of its prompts has something of a wrong type")


def frame_of(template, tokens, special, system="", thinking="auto"):
    """The Frame of a template. `tokens`: its variables; `special`: names of all special tokens.
    Raises Fault if it fails, or cannot do what is asked."""
    asked, padded = {"system": system} if system else {}, f"\n {PROMPT}\t\n"
    options = {} if thinking == "auto" else {"enable_thinking": thinking == "on"}
    if options and "enable_thinking" not in template:
        raise Fault(f"--thinking {thinking}: its chat template knows no enable_thinking")
    try:
        said = renderer(template, dict(tools=None, documents=None) | tokens | options)
        before, *after = said(**asked, user=PROMPT).split(PROMPT)
        shown = [x.join([before, *after]) for x in (padded, PROMPT)]
        if len(after) != 1 or (full := said(**asked, user=padded)) not in shown:
            raise Fault("its chat template does not say a prompt once and as it is (--chat none?)")
        if system and (said(user=PROMPT) == shown[1] or any(name in system for name in special)):
            raise Fault("--system has a special token, or its chat template says nothing of it")
        ended = said(user=PROMPT, assistant=ANSWER).partition(ANSWER)[2]
    except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError,
            AttributeError, RuntimeError, SyntaxError, MemoryError) as e:
        raise Fault(f"its chat template fails: {e!r} (--chat none?)") from e
    end = min((name for name in special if name in ended), key=ended.index, default="")
    return Frame("auto", system, thinking, before, after[0], full == shown[1], end)


def renderer(template, given):
    """A function that renders texts by role as transformers 5 does, in Jinja's sandbox, now."""
    def refuse(why):
        """What a template calls raise_exception."""
        raise jinja2.TemplateError(why)
    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                            extensions=["jinja2.ext.loopcontrols"])
    sandbox.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    sandbox.globals |= dict(raise_exception=refuse, strftime_now=datetime.now().strftime)
    # Blocks that only mark answers become what does nothing.
    page = sandbox.from_string(re.sub(r"({%[-+]?)\s*(end)?generation\b", r"\1 set _=0", template))
    def said(**texts):
        """The template's text of a talk, by role; it ends where the assistant would begin."""
        return page.render(given, messages=[dict(role=r, content=x) for r, x in texts.items()],
                           add_generation_prompt="assistant" not in texts)
    return said

"""The work of a chat template is limited, with the same output as without a limit."""

import contextlib

import pytest
from jinja2 import UndefinedError
from jinja2.exceptions import SecurityError
from transformers.utils import chat_template_utils

from raymm.data.conversations import template as template_module
from raymm.data.conversations.template import MOST_PASSES, ChatTemplate, limited_rendering
from raymm.errors import SampleError
from tests.raymm.data.conversations.test_spans import (
    FOLDER,
    SUFFIX,
    TEMPLATES,
    byte_tokenizer,
    said,
    user,
)

ENDLESS = {
    "nested loops": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    ),
    "a condition": (
        "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}"
    ),
    "recursion": (
        "{% for a in [1, 2] recursive %}{% if loop.depth < 60 %}{{ loop([1, 2]) }}{% endif %}"
        "{% endfor %}"
    ),
    "macros": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "the messages": "{% for a in messages %}" * 9 + "{% endfor %}" * 9,
}
USUAL = {
    "a loop": (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }} {{ m.content }};{% endfor %}"
    ),
    "a condition": (
        "{% for m in messages if m.role == 'user' %}{{ loop.last }}{{ m.content }}{% else %}none"
        "{% endfor %}"
    ),
    "a macro": (
        "{% macro f(m, end='.') %}{{ m.role }}{{ caller() if caller }}{{ end }}{% endmacro %}"
        "{% for m in messages %}{{ f(m) }}{% call f(m, '!') %}x{% endcall %}{% endfor %}"
    ),
    "breaks": (
        "{% for m in messages %}{% if loop.index0 == 2 %}{% break %}{% endif %}{{ m.content }}"
        "{{ loop.nextitem.role }}{% endfor %}"
    ),
    "unpacking": "{% for k, v in messages[0]|dictsort %}{{ k }}={{ v }} {% endfor %}",
    "blocks": (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}"
    ),
}
MESSAGES = [user("a"), said("b"), user("c"), said("d")]


def rendered(source, messages=MESSAGES):
    return ChatTemplate(byte_tokenizer(source)).render(messages)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ENDLESS)
def test_endless_templates_are_refused(name, monkeypatch):
    monkeypatch.setattr(template_module, "MOST_PASSES", 20_000)
    with pytest.raises(SampleError, match="more than 20,000 times for one sample"):
        rendered(ENDLESS[name], MESSAGES * 5)


@pytest.mark.parametrize("source", [
    "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__ }}",
    "{% macro f() %}{% endmacro %}{{ f.__init__.__globals__.os.getcwd() }}",
])
def test_templates_cannot_reach_python_objects(source):
    with pytest.raises(SecurityError):
        rendered(source)


@pytest.mark.parametrize("name", USUAL)
def test_limits_do_not_change_the_output(name, monkeypatch):
    limited = rendered(USUAL[name])
    monkeypatch.setattr(template_module, "_install", lambda: None)
    monkeypatch.setattr(
        chat_template_utils, "ImmutableSandboxedEnvironment",
        chat_template_utils.ImmutableSandboxedEnvironment.__mro__[1],
    )
    chat_template_utils._compile_jinja_template.cache_clear()
    try:
        assert rendered(USUAL[name]) == limited
    finally:
        chat_template_utils._compile_jinja_template.cache_clear()


def test_every_rendering_has_the_full_budget(monkeypatch):
    monkeypatch.setattr(template_module, "MOST_PASSES", 4)
    for _ in range(3):
        assert rendered("{% for m in messages %}{{ m.content }}{% endfor %}")[0] == "abcd"
    assert MOST_PASSES >= 1_000_000


def test_a_template_outside_of_a_limited_block_has_no_limit(monkeypatch):
    monkeypatch.setattr(template_module, "MOST_PASSES", 1)
    with limited_rendering():
        pass
    compiled = chat_template_utils._compile_jinja_template("{% for a in range(9) %}x{% endfor %}")
    assert compiled.render() == "x" * 9


@pytest.mark.parametrize("name", TEMPLATES)
def test_real_templates_stay_far_below_the_limit(name, monkeypatch):
    monkeypatch.setattr(template_module, "MOST_PASSES", 1000)
    with contextlib.suppress(UndefinedError):  # contents there are lists of parts
        rendered((FOLDER / f"{name}{SUFFIX}").read_text(), MESSAGES * 5)

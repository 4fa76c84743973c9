"""A log that stays scrolled to its end as it grows, unless the user has scrolled up; scrollable by keyboard too."""

from __future__ import annotations

import gradio as gr

_TEMPLATE = '<pre class="log" tabindex="0" role="log" aria-label="Log" aria-live="off">${value}</pre>'
_SCRIPT = """
const box = element.querySelector('.log');
let isAtEnd = true;
const follow = () => { if (isAtEnd) box.scrollTop = box.scrollHeight; };
box.addEventListener('scroll', () => { isAtEnd = box.scrollTop + box.clientHeight > box.scrollHeight - 30; });
new ResizeObserver(follow).observe(box);  // drawn in a tab that is not shown, it has no height yet
watch('value', follow);
follow();
"""


def make_log() -> gr.HTML:
    """Return a log, whose value is markup."""
    return gr.HTML("", html_template=_TEMPLATE, js_on_load=_SCRIPT, apply_default_css=False, elem_classes="markup")

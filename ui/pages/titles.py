"""The title of a browser's tab, so that five tabs do not look alike."""

from __future__ import annotations

import gradio as gr

# What the address names stands behind the page's own words: the title is right before the server is asked.
_SCRIPT = """
const show = () => {
  if (!props.value) return;
  const query = new URLSearchParams(location.search);
  const names = query.getAll('run').concat(query.getAll('runs')).join(', ').replaceAll(',', ', ');
  document.title = `${props.value}${names ? ' ' + names : ''} - lorashard`.replace(/\\s+/g, ' ');
};
watch('value', show);
show();
"""


def make_title(words: str = "") -> gr.HTML:
    """Return what gives a page its title: its value, the runs of the address, and the program's name.

    Args:
        words: at first; empty leaves the title as it is.
    """
    return gr.HTML(words, js_on_load=_SCRIPT, visible="hidden")

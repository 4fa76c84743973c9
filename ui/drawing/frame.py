"""The frame of every page, in plain HTML: what is seen until Gradio's scripts, which take a second or more, draw it."""

from __future__ import annotations

from collections.abc import Mapping

from .markup import Markup, link, tag

# The colors of `theme`, whose variables are not there yet.
_RULES = """
#frame { --gray: #e2e8f0; --line: #e2e8f0; box-sizing: border-box; width: 100%; color: #0f172a;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
body:has(gradio-app nav) #frame { display: none; }
#frame nav { border-bottom: 1px solid var(--line); padding: 11px 0 13px; }
#frame nav > div, #frame main { box-sizing: border-box; max-width: 1400px; margin: 0 auto; padding: 0 32px; }
#frame nav > div { display: flex; flex-wrap: wrap; gap: 4px 24px; align-items: baseline; }
#frame a { color: inherit; text-decoration: none; }
#frame main div { margin-top: 24px; border-radius: 4px; background: var(--gray); height: 42px; }
#frame main div:first-child { width: 180px; height: 28px; }
#frame main div:last-child { height: 50vh; }
@media (prefers-color-scheme: dark) { #frame { --gray: #1e293b; --line: #1e293b; color: #f1f5f9; } }
@media (max-width: 640px) {
  #frame nav > div, #frame main { padding-inline: 12px; }
  #frame nav strong { display: none; }
  #frame nav > div { gap: 4px 14px; }
}
"""
# A clock of Gradio's, which tells how long a page has taken to load, runs on at each frame for as long as the page is
# open: a tenth of a core. Once a second will do for a clock.
_SLOW_CLOCK = r"""{
  const ask = requestAnimationFrame.bind(window);
  window.requestAnimationFrame = (run) =>
    /performance\.now\(\).*1e3/.test(run) ? (setTimeout(ask, 1000, run), 0) : ask(run);
}"""


# Gradio opens a list of choices a moment after a key: where the field was left meanwhile, as by Tab, it would stay open
# over the fields below for good.
_CLOSE_LISTS = """{
  document.addEventListener('keydown', (event) => {
    const isOfList = event.target.matches?.('[role=combobox]') && event.isTrusted;
    if (isOfList && ['Tab', 'Shift', 'Control', 'Alt', 'Meta'].includes(event.key)) event.stopPropagation();
  }, true);
  new MutationObserver((changes) => changes.forEach(({target}) => {
    const isLeft = target.ariaExpanded === 'true' && target !== document.activeElement;
    if (isLeft) target.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape', bubbles: true}));
  })).observe(document, {subtree: true, attributeFilter: ['aria-expanded']});
}"""


def draw_frame(pages: Mapping[str, str]) -> Markup:
    """Return the frame, which hides itself once Gradio has drawn the page.

    Args:
        pages: the path of each page in the navigation bar, by its title.
    """
    links = (link(path, title) for title, path in pages.items())
    bar = tag("nav", tag("div", tag("strong", "lorashard"), *links))
    body = tag("main", tag("div"), tag("div"), tag("div"), aria_label="The page is loading", aria_busy="true")
    first = Markup(f"<style>{_RULES}</style><script>{_SLOW_CLOCK}{_CLOSE_LISTS}</script>")
    return tag("div", first, bar, body, id="frame")

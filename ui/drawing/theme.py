"""How the app looks: system fonts, quiet colors that read in light and dark, and nothing from another host."""

from __future__ import annotations

import gradio as gr

from .style import STYLE

# Two shards that overlap: dark enough on white tabs, bright enough on dark ones.
FAVICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><rect width="32" height="32" rx="7" fill="#1d4ed8"/>'
    '<path d="M8 23 14 7h4l-6 16z" fill="#fff"/><path d="m16 25 5-14h4l-5 14z" fill="#93c5fd"/></svg>'
)

_FONT = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Noto Sans", "sans-serif")
_FONT_MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace")

_CSS = """
gradio-app, .gradio-container { width: 100%; }
.gradio-container { max-width: none !important; }
.gradio-container .fillable { width: 100%; max-width: 1400px !important; margin-inline: auto !important; }
.gradio-container nav.fillable { justify-content: flex-start; align-items: baseline; }
.gradio-container nav.fillable::before { content: "lorashard"; font-weight: 700; margin-inline-end: 12px; }
.gradio-container nav a.active { font-weight: 600; }
.gradio-container h1 { font-size: 1.5rem; }
.gradio-container h2 { font-size: 1.2rem; }
:is(a, button, input, textarea, select, summary, [tabindex]):focus-visible {
  outline: 3px solid #2563eb !important; outline-offset: 2px;
}
.dark :is(a, button, input, textarea, select, summary, [tabindex]):focus-visible { outline-color: #93c5fd !important; }
/* Gradio's colors for these are too pale on white to be read. */
body:not(.dark) :is(.cm-line, .cm-line span) { color: var(--body-text-color) !important; }
body:not(.dark) [role=tab].selected { color: var(--primary-700) !important; }
@media (max-width: 640px) {
  .gradio-container .fillable { padding-inline: 12px !important; }
  .gradio-container nav.fillable { gap: 0; }
  .gradio-container nav a { padding: 4px 7px; }
  .gradio-container nav.fillable::before { content: none; }
}
@media (prefers-reduced-motion: reduce) {
  *, *::before, *::after { animation: none !important; transition: none !important; scroll-behavior: auto !important; }
}
"""


def build_theme() -> gr.themes.Base:
    """Return the theme of all pages."""
    return gr.themes.Base(
        primary_hue=gr.themes.colors.blue,
        secondary_hue=gr.themes.colors.blue,
        neutral_hue=gr.themes.colors.slate,
        radius_size=gr.themes.sizes.radius_sm,
        font=_FONT,
        font_mono=_FONT_MONO,
    ).set(
        body_background_fill="*neutral_50",
        body_background_fill_dark="*neutral_950",
        body_text_color="*neutral_900",
        body_text_color_dark="*neutral_100",
        body_text_color_subdued="*neutral_600",
        body_text_color_subdued_dark="*neutral_300",
        block_border_width="1px",
        block_shadow="none",
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        button_primary_background_fill_dark="*primary_700",
        button_primary_background_fill_hover_dark="*primary_600",
        button_primary_text_color="white",
        button_primary_text_color_dark="white",
        button_transition="none",
        input_placeholder_color="*neutral_500",
        input_placeholder_color_dark="*neutral_400",
        link_text_color="*primary_700",
        link_text_color_dark="*primary_300",
    )


def build_head() -> str:
    """Return what stands in the head of every page.

    The rules are here and not Gradio's `css`, which would prefix their selectors and lose some.
    """
    links = '<meta name="color-scheme" content="light dark"><link rel="icon" type="image/svg+xml" href="favicon.ico">'
    return f"{links}<style>{_CSS}{STYLE}</style>"

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
.gradio-container nav.fillable { justify-content: flex-start; align-items: baseline; gap: var(--spacing-xs); }
.gradio-container nav.fillable::before { content: "lorashard"; font-weight: 700; font-size: var(--text-lg);
  margin-inline-end: var(--spacing-xl); }
.gradio-container nav.fillable a { font-size: var(--text-md); border-color: transparent !important; }
.gradio-container nav.fillable a.active { font-weight: 600; background: none !important;
  box-shadow: inset 0 -2px var(--color-accent); border-radius: 0; }
.gradio-container h1 { font-size: var(--text-xxl); line-height: 1.2; letter-spacing: -0.01em; }
.gradio-container h2 { font-size: var(--text-xl); line-height: 1.3; }
.gradio-container h3 { font-size: var(--text-lg); }
.gradio-container :is(h1, h2, h3) { font-weight: 700; }
/* Fields have no box of their own: what holds them may not cut the ring around the one in focus. */
.gradio-container .form { background: none; overflow: visible; }
.gradio-container .block:has(:is(input, textarea):focus-visible) { overflow: visible !important; }
/* A button in a row of fields, whose labels are above them. */
.gradio-container .at-field { align-self: flex-end; }
.gradio-container :is([role=radiogroup], .checkbox-container, fieldset) label { padding-left: 0; }
.gradio-container .wrap:has(> .wrap-inner) { border: 1px solid var(--input-border-color) !important; }
.gradio-container [data-testid=block-info] { margin-bottom: var(--spacing-xs); }
.gradio-container button.primary:disabled { background: none; border-color: var(--button-secondary-border-color);
  color: var(--button-secondary-text-color); }
:is(a, button, input, textarea, select, summary, [tabindex]):focus-visible {
  outline: 3px solid #2563eb !important; outline-offset: 2px;
}
.dark :is(a, button, input, textarea, select, summary, [tabindex]):focus-visible { outline-color: #93c5fd !important; }
/* Gradio's colors for these are too pale on white to be read. */
body:not(.dark) :is(.cm-line, .cm-line span) { color: var(--body-text-color) !important; }
body:not(.dark) [role=tab].selected { color: var(--primary-700) !important; }
.dark [role=tab].selected { color: var(--primary-300) !important; }
@media (max-width: 640px) {
  .gradio-container .fillable { padding-inline: 12px !important; }
  .gradio-container nav.fillable { gap: 0; }
  .gradio-container nav.fillable a { padding: 4px 7px; }
  .gradio-container nav.fillable::before { content: none; }
}
@media (prefers-reduced-motion: reduce) {
  *, *::before, *::after { animation: none !important; transition: none !important; scroll-behavior: auto !important; }
}
"""

# Type and space go by few steps: what is large is what matters. `style` and the pages name them as Gradio does,
# `--text-xl` and `--spacing-lg`; paddings of Gradio's own parts follow.
_TEXT = gr.themes.Size("11px", "12px", "13px", "14px", "16px", "18px", "26px", "lorashard")
_SPACING = gr.themes.Size("2px", "4px", "6px", "8px", "12px", "16px", "24px", "lorashard")


def build_theme() -> gr.themes.Base:
    """Return the theme of all pages: fields without boxes around them, and white surfaces for what is read."""
    return gr.themes.Base(
        primary_hue=gr.themes.colors.blue,
        secondary_hue=gr.themes.colors.blue,
        neutral_hue=gr.themes.colors.slate,
        radius_size=gr.themes.sizes.radius_md,
        text_size=_TEXT,
        spacing_size=_SPACING,
        font=_FONT,
        font_mono=_FONT_MONO,
    ).set(
        body_background_fill="*neutral_50",
        body_background_fill_dark="*neutral_950",
        body_text_color="*neutral_900",
        body_text_color_dark="*neutral_100",
        body_text_color_subdued="*neutral_600",
        body_text_color_subdued_dark="*neutral_300",
        background_fill_primary_dark="*neutral_900",
        background_fill_secondary_dark="*neutral_800",
        color_accent="*primary_600",
        block_background_fill="transparent",
        block_background_fill_dark="transparent",
        block_border_width="0px",
        block_padding="0px",
        block_shadow="none",
        block_radius="*radius_lg",
        block_title_text_color="*neutral_800",
        block_title_text_color_dark="*neutral_200",
        block_title_text_size="*text_sm",
        block_title_text_weight="600",
        block_label_text_color="*neutral_600",
        block_label_text_color_dark="*neutral_300",
        block_info_text_size="*text_xs",
        form_gap_width="*spacing_xl",
        layout_gap="*spacing_xl",
        input_background_fill="white",
        input_background_fill_dark="*neutral_900",
        input_border_width="1px",
        input_border_color="*neutral_300",
        input_border_color_dark="*neutral_600",
        input_padding="*spacing_md *spacing_lg",
        input_radius="*radius_md",
        input_placeholder_color="*neutral_500",
        input_placeholder_color_dark="*neutral_400",
        checkbox_border_color="*neutral_400",
        checkbox_border_color_dark="*neutral_500",
        checkbox_label_border_width="0px",
        checkbox_label_background_fill="transparent",
        checkbox_label_background_fill_dark="transparent",
        checkbox_label_background_fill_hover="transparent",
        checkbox_label_background_fill_hover_dark="transparent",
        checkbox_label_padding="3px *spacing_sm",  # of lists to choose from, too
        button_border_width="1px",
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        button_primary_background_fill_dark="*primary_700",
        button_primary_background_fill_hover_dark="*primary_600",
        button_primary_border_color="*primary_700",
        button_primary_border_color_dark="*primary_700",
        button_primary_text_color="white",
        button_primary_text_color_dark="white",
        button_secondary_background_fill="white",
        button_secondary_background_fill_hover="*neutral_100",
        button_secondary_background_fill_dark="*neutral_800",
        button_secondary_background_fill_hover_dark="*neutral_700",
        button_secondary_border_color="*neutral_300",
        button_secondary_border_color_dark="*neutral_600",
        button_secondary_text_color="*neutral_900",
        button_secondary_text_color_dark="*neutral_100",
        button_cancel_background_fill="white",
        button_cancel_background_fill_hover="#fef2f2",
        button_cancel_background_fill_dark="*neutral_800",
        button_cancel_background_fill_hover_dark="#450a0a",
        button_cancel_border_color="#b91c1c",
        button_cancel_border_color_dark="#fca5a5",
        button_cancel_text_color="#b91c1c",
        button_cancel_text_color_dark="#fca5a5",
        button_large_radius="*radius_md",
        button_large_text_size="*text_md",
        button_medium_text_size="*text_md",
        button_small_text_size="*text_sm",
        button_small_text_weight="500",
        button_small_padding="*spacing_sm *spacing_lg",
        button_medium_padding="*spacing_md *spacing_xl",
        button_large_padding="10px *spacing_xl",
        button_transition="none",
        link_text_color="*primary_700",
        link_text_color_dark="*primary_300",
        section_header_text_size="*text_lg",
        section_header_text_weight="600",
    )


def build_head() -> str:
    """Return what stands in the head of every page.

    The rules are here and not Gradio's `css`, which would prefix their selectors and lose some.
    """
    links = '<meta name="color-scheme" content="light dark"><link rel="icon" type="image/svg+xml" href="favicon.ico">'
    return f"{links}<style>{_CSS}{STYLE}</style>"

"""The rules of what `markup` draws. Colors are Gradio's own variables, so that light and dark both hold."""

from __future__ import annotations

STYLE = """
.gradio-container { --good: #15803d; --busy: #1d4ed8; --odd: #a16207; --bad: #b91c1c; }
.dark .gradio-container, .gradio-container.dark { --good: #4ade80; --busy: #93c5fd; --odd: #facc15; --bad: #fca5a5; }

.html-container { padding: 0 !important; }
.markup { color: var(--body-text-color); line-height: 1.5; }
.markup :is(h1, h2) { margin: 0; font-weight: 700; }
.markup p { margin: 4px 0; }
.markup a:not(.button) { color: var(--link-text-color); text-decoration: underline; }
.markup code { font-family: var(--font-mono); }

.run-title { display: flex; flex-wrap: wrap; align-items: center; gap: 4px 12px; margin: 0 0 4px; }
.run-title h1 { margin: 0; overflow-wrap: anywhere; }
.subdued { color: var(--body-text-color-subdued); }

.state { white-space: nowrap; font-weight: 600; }
.state-queued, .state-stopped, .state-canceled { color: var(--body-text-color-subdued); }
.state-starting, .state-running, .state-stopping { color: var(--busy); }
.state-done { color: var(--good); }
.state-failed { color: var(--bad); }
.state-dead, .state-lost { color: var(--odd); }

.facts { display: flex; flex-wrap: wrap; gap: 8px 28px; margin: 8px 0; }
.facts div { min-width: 0; }
.facts dt { font-size: 0.8rem; color: var(--body-text-color-subdued); }
.facts dd { margin: 0; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }

.phases { display: flex; flex-wrap: wrap; gap: 4px 20px; list-style: none; padding: 0; margin: 8px 0 6px; }
.phases li { margin: 0; color: var(--body-text-color-subdued); }
.phases li[aria-current] { color: var(--busy); font-weight: 600; }
.bar { height: 8px; border-radius: 4px; overflow: hidden; background: var(--border-color-primary); }
.bar span { display: block; height: 100%; background: #2563eb; }
.bar-sentence { margin: 4px 0 0; font-variant-numeric: tabular-nums; }

.note { margin: 6px 0; padding: 8px 12px; border-left: 4px solid var(--busy); background: var(--block-background-fill);
  overflow-wrap: anywhere; }
.note-warning { border-left-color: var(--odd); }
.note-error { border-left-color: var(--bad); }

.wide-table { overflow-x: auto; }
.wide-table table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 0; }
.wide-table caption { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
.wide-table th, .wide-table td { padding: 6px 10px; border: 0; border-bottom: 1px solid var(--border-color-primary);
  text-align: left; vertical-align: top; }
.wide-table th { color: var(--body-text-color-subdued); font-size: 0.85rem; font-weight: 600; white-space: nowrap; }
.wide-table .number { text-align: right; white-space: nowrap; }
.wide-table td.text { overflow-wrap: break-word; max-width: 24em; min-width: 4em; }
.wide-table th button { all: unset; cursor: pointer; }
.wide-table th button:hover { text-decoration: underline; }
.wide-table th button:focus-visible { outline: 3px solid #2563eb; outline-offset: 2px; }
.wide-table input[type=checkbox] { width: 18px; height: 18px; }
.wide-table input[type=checkbox]:checked { background-color: #2563eb !important; border-color: #2563eb !important; }
.wide-table .said { white-space: pre-wrap; overflow-wrap: anywhere; }

@media (max-width: 640px) {
  .tabs .tab-container button { padding-inline: 6px; }
  .cards :is(table, thead, tbody, tr, td) { display: block; }
  .cards thead tr { display: flex; flex-wrap: wrap; gap: 0 4px; }
  .cards thead th { border: 0; padding: 6px 8px; }
  .cards thead th:not(:has(button)), .cards td.blank { display: none !important; }
  .cards tbody tr { border: 1px solid var(--border-color-primary); border-radius: var(--radius-md); margin: 8px 0;
    padding: 6px 2px; background: var(--block-background-fill); }
  .cards td, .cards td.number { display: flex; justify-content: space-between; gap: 16px; border: 0; padding: 2px 10px;
    text-align: right; white-space: normal; }
  .cards td.text { max-width: none; overflow-wrap: anywhere; }
  .cards td::before { content: attr(data-label); color: var(--body-text-color-subdued); flex: none; }
}
.gpus { list-style: none; padding: 0; margin: 0; display: flex; flex-wrap: wrap; gap: 4px 28px; }
.markup a.button-primary { background: var(--button-primary-background-fill);
  color: var(--button-primary-text-color) !important; }

.chart-block { padding: 0 !important; }
.chart-frame { margin: 0; padding: 8px 8px 0; border: 1px solid var(--border-color-primary);
  border-radius: var(--radius-md); background: var(--block-background-fill); }
.chart-frame figcaption { padding: 0 4px; font-size: 0.85rem; color: var(--body-text-color-subdued); }
.chart { min-height: 120px; }

.links { display: flex; flex-wrap: wrap; gap: 8px 12px; align-items: center; }
.markup .button { display: inline-block; margin: 0 !important; padding: 6px 14px; cursor: pointer;
  border: 1px solid var(--border-color-primary);
  border-radius: var(--radius-md); color: var(--body-text-color) !important; text-decoration: none !important;
  background: var(--button-secondary-background-fill); font: inherit; }
.markup .button:hover { border-color: var(--busy); }
.markup .button[disabled] { color: var(--body-text-color-subdued) !important; background: none; cursor: default; }
.page-head { display: flex; flex-wrap: wrap; align-items: center; justify-content: space-between; gap: 8px 12px; }
.log { margin: 0; padding: 10px; height: 60vh; overflow: auto; font-family: var(--font-mono); font-size: 0.8rem;
  border: 1px solid var(--border-color-primary); background: var(--block-background-fill); }

.talk { display: flex; flex-direction: column-reverse; overflow-y: auto; height: 38vh; min-height: 200px; padding: 10px;
  border: 1px solid var(--border-color-primary); border-radius: var(--radius-md);
  background: var(--block-background-fill); }
.talk > div { margin-bottom: auto; }
.talk .turn { margin: 0 0 12px; }
.talk .turn-user { margin-left: 12%; padding: 6px 10px; border-radius: var(--radius-md);
  background: var(--background-fill-secondary); border: 1px solid var(--border-color-primary); }
.talk .who { font-size: 0.8rem; font-weight: 600; color: var(--body-text-color-subdued); }
.talk .said { white-space: pre-wrap; overflow-wrap: anywhere; }
.talk .subdued { font-size: 0.8rem; }
@media (max-width: 640px) { .talk { height: 32vh; } }
"""

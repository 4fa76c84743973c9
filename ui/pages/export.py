"""The page "Export": download an adapter, merge it into its base, verify it, upload it to the Hub."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gradio as gr

from lorashard.errors import ConfigError
from lorashard.runtime.disk import show_bytes

from ..app_context import AppContext
from ..drawing.markup import Markup, badge, link, note, table, tag
from ..drawing.wording import show_duration, show_time
from ..form import exporting
from ..reading.jsonl_tail import read_end
from ..reading.places import show_paths
from ..reading.sanitize import show_safely
from ..reading.summaries import find_quantization, read_options
from ..running import control
from ..running.jobs import Job, merge_words, push_words, verify_words
from ..running.packing import find_adapter_run, list_merged, pack_adapter
from .adapters import find_device_words, make_choice, offer_checkpoints, open_page
from .refreshing import QUIET, Parts, make_html, show_if_any, was_sent_after

_REFRESH_S = 2.0
_LOG_BYTES = 1 << 16
_LOG_LINES = 200
_DTYPES = ["auto", "bfloat16", "float16", "float32"]
_ADAPTER_ITSELF = "the adapter itself"
_ALL_JOBS = 20
_KINDS = ("merge", "verify", "push")


def build(context: AppContext) -> None:
    """Add the page's components and events to the page that is being built."""
    timer = gr.Timer(_REFRESH_S)
    make_html(tag("h1", "Export"))
    empty = make_html(visible=False)
    with gr.Column(visible=False) as body:
        with gr.Row():
            run, checkpoint, gpus, ranks = make_choice()
        with gr.Tabs():
            with gr.Tab("Download"):
                make_html(tag("p", "The adapter and its tokenizer: plain PEFT files, in a zip."))
                download = gr.DownloadButton("Download the adapter", variant="primary", interactive=False)
                download_told = make_html(visible=False)
            with gr.Tab("Merge"):
                make_html(tag("p", "Merges the adapter into a copy of its base, which gives a standalone model."))
                with gr.Row():
                    out = gr.Textbox(
                        "", label="Output folder", info=f"in {show_paths(str(context.root))}", min_width=220
                    )
                    dtype = gr.Dropdown(
                        _DTYPES, value="auto", label="dtype", info="auto: as in the base", min_width=140
                    )
                    merge_repo = gr.Textbox(
                        "",
                        label="Upload to (optional)",
                        placeholder="org/name",
                        info="a Hub repo",
                        min_width=220,
                    )
                    merge_private = gr.Checkbox(True, label="Private repo", min_width=120)
                merged_base = gr.Dropdown(
                    list(exporting.MERGED_BASES),
                    value=exporting.AS_TRAINED,
                    label="Base weights",
                    info="The base was quantized during training, and the adapter was trained on its quantized values",
                    visible=False,
                    elem_id="merged-base",
                )
                merge = gr.Button("Merge", variant="primary")
                merge_told = make_html(visible=False)
            with gr.Tab("Verify"):
                make_html(tag("p", "Compares logits with those of the adapter on its base, loaded by plain PEFT."))
                merged = gr.Dropdown([_ADAPTER_ITSELF], value=_ADAPTER_ITSELF, label="What to verify")
                verify = gr.Button("Verify", variant="primary")
                verify_told = make_html(visible=False)
            with gr.Tab("Push"):
                login = make_html()
                with gr.Row():
                    repo = gr.Textbox("", label="Repo", placeholder="org/name", min_width=220)
                    is_private = gr.Checkbox(True, label="Private repo", min_width=120)
                push = gr.Button("Upload the adapter", variant="primary")
                push_told = make_html(visible=False)
            with gr.Tab("Delete"):
                make_html(tag("p", "Deletes a merged model from the disk of the server, and no run."))
                with gr.Row():
                    unwanted = gr.Dropdown([], value=None, label="Merged model", min_width=220)
                    typed = gr.Textbox("", label="Its name again", placeholder="type it to delete it", min_width=220)
                delete = gr.Button("Delete permanently", variant="stop")
                delete_told = make_html(visible=False)
    make_html(tag("h2", "Jobs"))
    jobs = make_html()
    with gr.Column(visible=False) as one_job:
        with gr.Row():
            job = gr.Dropdown([], label="Log of", scale=4, min_width=200)
            cancel = gr.Button(
                "Cancel", variant="stop", size="md", elem_classes="at-field", interactive=False, scale=1, min_width=100
            )
        cancel_told = make_html(visible=False)
        log = gr.Textbox(label="Log", lines=8, max_lines=16, interactive=False, buttons=["copy"], elem_id="job-log")
    started = gr.Textbox(visible=False, value="{}")  # the id of the last job of each kind that was started here
    parts = Parts(
        jobs=jobs, one_job=one_job, job=job, cancel=cancel, log=log, merged=merged, unwanted=unwanted, login=login,
        merge=merge_told, verify=verify_told, push=push_told,
    )  # fmt: skip
    devices = [checkpoint, gpus, ranks]
    prepared = [download, download_told, out, merged_base]

    def arrive(request: gr.Request) -> list[Any]:
        return open_page(context, request, "Train one, then export it here.", ("export", "Choose another run"))

    def prepare(name: str | None, checkpoint: str) -> dict[Any, Any]:
        if not name:
            return gr.skip()
        try:
            folder = find_adapter_run(context.root, name)
            find_adapter_run(context.root, name, checkpoint)
            packed = pack_adapter(folder, Path(download.GRADIO_CACHE) / "adapters", checkpoint)
        except ConfigError as error:
            return {download: gr.update(interactive=False), download_told: show_if_any(note(str(error), "error"))}
        label = f"Download the adapter ({show_bytes(packed.stat().st_size)})"
        return {
            download: gr.update(value=str(packed), label=label, interactive=True),
            download_told: show_if_any(""),
            out: "-".join(filter(None, (name.replace("/", "-"), checkpoint, "merged"))),
            merged_base: gr.update(value=exporting.AS_TRAINED, visible=bool(find_quantization(read_options(folder)))),
        }

    def refresh(seen: str, chosen: str | None, started: str) -> dict[Any, Any]:
        known = context.jobs.list()[:_ALL_JOBS]
        ids = [one.id for one in known]
        # The log of a job that has just been started here is shown, whatever was.
        told = json.loads(started)
        begun = json.dumps([one["id"] for one in told.values() if "id" in one])
        is_kept = chosen in ids and was_sent_after(seen, begun)
        chosen = chosen if is_kept else (ids[0] if ids else None)
        shown = next((one for one in known if one.id == chosen), None)
        running = [one.id for one in known if one.state == "running"]
        whole = list_merged(context.root)
        return parts.send(
            seen,
            {kind: show_if_any(draw_started(told.get(kind), running)) for kind in _KINDS}
            | {
                "jobs": draw_jobs(known),
                "one_job": gr.update(visible=bool(known)),
                "job": gr.update(choices=[(name_job(one), one.id) for one in known], value=chosen),
                "cancel": gr.update(interactive=shown is not None and shown.state == "running"),
                "log": show_end(shown.log_path) if shown is not None else "",
                "merged": gr.update(choices=[_ADAPTER_ITSELF, *whole]),
                "unwanted": gr.update(choices=whole),
                "login": draw_login(exporting.is_logged_in()),
            },
            begun,
        )

    def start(told: str, name: str | None, kind: str, find_words: Callable[[], list[str]]) -> str:
        try:
            said = {"id": context.jobs.start(kind, name or "", find_words())}
        except ConfigError as error:
            said = {"error": show_paths(str(error))}
        return json.dumps(json.loads(told) | {kind: said})

    def start_merge(
        told: str,
        name: str | None,
        checkpoint: str,
        gpus: list[int],
        ranks: float | None,
        out: str,
        dtype: str,
        repo: str,
        is_private: bool,
        base: str,
    ) -> str:
        def find_words() -> list[str]:
            devices, base_words = find_device_words(gpus, ranks), exporting.MERGED_BASES[base]
            asked = exporting.check_merge(
                context.root, name, out, dtype, devices, repo, is_private, base_words, checkpoint
            )
            return merge_words(asked.run_folder, asked.out, asked.options)

        return start(told, name, "merge", find_words)

    def start_verify(
        told: str, name: str | None, checkpoint: str, gpus: list[int], ranks: float | None, merged: str
    ) -> str:
        def find_words() -> list[str]:
            model, devices = None if merged == _ADAPTER_ITSELF else merged, find_device_words(gpus, ranks)
            return verify_words(*exporting.check_verify(context.root, name, model, devices, checkpoint))

        return start(told, name, "verify", find_words)

    def start_push(told: str, name: str | None, checkpoint: str, repo: str, is_private: bool) -> str:
        def find_words() -> list[str]:
            folder = find_adapter_run(context.root, name, checkpoint)
            return push_words(folder, exporting.check_repo(repo), is_private)

        return start(told, name, "push", find_words)

    def delete_merged(name: str | None, typed: str) -> list[Any]:
        try:
            if not name or typed.strip() != name:
                raise ConfigError(f"To delete it, choose it and type its name: {name or ''}")
            control.delete_merged(context.root, name)
        except ConfigError as error:
            return [show_if_any(note(str(error), "error")), gr.skip(), gr.skip()]
        return [show_if_any(note(f"Deleted: {name}")), None, ""]

    def end_job(chosen: str | None) -> Any:
        try:
            context.jobs.cancel(chosen or "")
            return show_if_any("")
        except ConfigError as error:
            return show_if_any(note(str(error), "error"))

    refreshed = parts.refresh_by(timer, refresh, [job, started])
    packing = {"fn": prepare, "inputs": [run, checkpoint], "outputs": prepared} | QUIET
    offering = {"fn": lambda name: offer_checkpoints(context, name), "inputs": run, "outputs": checkpoint} | QUIET
    gr.on(None, arrive, None, [empty, body, run, gpus], **QUIET).then(**refreshed)
    # Not `input`: Gradio's lists send it when they are left, whatever was chosen.
    run.change(**offering).then(**packing)
    checkpoint.input(**packing)
    job.input(**refreshed)
    merging = [started, run, *devices, out, dtype, merge_repo, merge_private, merged_base]
    merge.click(start_merge, merging, started, **QUIET).then(**refreshed)
    verify.click(start_verify, [started, run, *devices, merged], started, **QUIET).then(**refreshed)
    push.click(start_push, [started, run, checkpoint, repo, is_private], started, **QUIET).then(**refreshed)
    delete.click(delete_merged, [unwanted, typed], [delete_told, unwanted, typed], **QUIET).then(**refreshed)
    cancel.click(end_job, job, cancel_told, **QUIET).then(**refreshed)


def draw_started(told: dict[str, str] | None, running: Sequence[str]) -> str:
    """Say how a click was answered: by a mistake, or by a job, until that has ended; nothing before a click."""
    if told is None:
        return ""
    if "error" in told:
        return note(told["error"], "error")
    return note("Started; see Jobs below.") if told["id"] in running else ""


def draw_jobs(jobs: Sequence[Job]) -> Markup:
    """Return the jobs in a table, the newest first."""
    if not jobs:
        return tag("p", "None yet. Jobs continue when this page is closed.", class_="subdued")
    headers = ("job", "state", "last output", "started", "duration")
    return table(headers, [_draw_row(job) for job in jobs], "Jobs", num_text=3, class_="cards")


def name_job(job: Job) -> str:
    """Return a label that identifies a job."""
    return f"{job.kind} {job.run_name}, {show_time(job.begin_s)}"


def show_end(log: Path) -> str:
    """Return the end of a job's log, without secrets and control characters."""
    text = read_end(log, _LOG_BYTES).decode("utf-8", "replace")
    return show_paths("\n".join(show_safely(text).splitlines()[-_LOG_LINES:]))


def draw_login(is_logged_in: bool) -> Markup:
    """Return what the tab does, or how to log in first."""
    if is_logged_in:
        return tag("p", "Uploads the adapter, its tokenizer and its card to the Hugging Face Hub.")
    return note(
        "Nobody is logged in to the Hugging Face Hub on this machine: run `hf auth login` in a terminal. Tokens cannot "
        "be entered in the browser.",
        "warning",
    )


def _draw_row(job: Job) -> list[str]:
    state: list[str] = [badge(job.state)]
    if job.state == "running" and job.progress is not None:
        state.append(tag("progress", value=str(job.progress), max=1, aria_label="progress"))
    if job.state == "failed":
        state.append(tag("div", f"exit code {job.exit_code}", class_="subdued"))
    took_s = None if job.begin_s is None else (job.end_s or time.time()) - job.begin_s
    said = show_paths(show_safely(job.last_line or ""))
    name = tag("div", job.kind, " ", link("run", job.run_name, name=job.run_name))
    return [name, tag("div", *state), said, show_time(job.begin_s), show_duration(took_s)]

"""Against a stub of the hub on loopback, which answers what huggingface_hub asks: info, tree, HEAD and GET of files."""

import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from headstart.core.errors import ConfigError
from headstart.model.weights.hub import resolve_model

FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"weights " * 1000,
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "pytorch_model.bin": b"pickle",
    "modeling_evil.py": b"raise SystemExit",
    "onnx/config.json": b"{}",
    "consolidated.00.safetensors": b"twice",
}
NEWER = {**FILES, "config.json": b'{"model_type": "qwen3"}'}


@dataclass
class StubHub:
    """`commits` by revision name; every request is kept as (method, path, authorization)."""

    url: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"a" * 40: FILES, "b" * 40: NEWER})
    revisions: dict[str, str] = field(default_factory=lambda: {"main": "a" * 40, "v2": "b" * 40})
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    refuse: tuple[int, str] | None = None  # (status, X-Error-Code) for everything


def handler_of(hub: StubHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            path = self.path.partition("?")[0]
            hub.requests.append((self.command, path, self.headers.get("Authorization")))
            if hub.refuse is not None:
                self.reply(hub.refuse[0], b"{}", {"X-Error-Code": hub.refuse[1]})
            elif path.startswith("/api/models/org/tiny/revision/"):
                self.info(path.rpartition("/")[2])
            elif path.startswith("/api/models/org/tiny/tree/"):
                self.tree(path.rpartition("/")[2])
            elif path.startswith("/org/tiny/resolve/"):
                commit, _, name = path.removeprefix("/org/tiny/resolve/").partition("/")
                content = hub.files[commit][name]
                etag = hashlib.sha1(content).hexdigest()
                self.reply(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": commit})
            else:
                self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})

        def info(self, revision: str) -> None:
            commit = hub.revisions.get(revision)
            if commit is None:
                self.reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
                return
            siblings = [{"rfilename": name} for name in hub.files[commit]]
            self.reply(200, json.dumps({"id": "org/tiny", "sha": commit, "siblings": siblings}).encode(), {})

        def tree(self, commit: str) -> None:
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in hub.files[commit].items()
            ]
            self.reply(200, json.dumps(entries).encode(), {})

        def reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", **headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    return Handler


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubHub]:
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    stub = StubHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(stub))
    stub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield stub
    server.shutdown()
    server.server_close()
    thread.join(120)


def test_downloads_weights_and_tokenizer_but_no_code_no_pickle_and_no_duplicates(hub: StubHub, tmp_path: Path) -> None:
    folder = resolve_model("org/tiny", endpoint=hub.url, download_dir=str(tmp_path))
    wanted = {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert {p.name for p in folder.rglob("*")} == wanted
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_second_time_works_offline_without_a_single_request(hub: StubHub, tmp_path: Path) -> None:
    first = resolve_model("org/tiny", endpoint=hub.url, download_dir=str(tmp_path))
    hub.requests.clear()
    assert resolve_model("org/tiny", endpoint=hub.url, download_dir=str(tmp_path), offline=True) == first
    assert hub.requests == []


def test_downloaded_model_is_served_when_the_hub_is_down(hub: StubHub, tmp_path: Path) -> None:
    first = resolve_model("org/tiny", endpoint=hub.url, download_dir=str(tmp_path))
    hub.refuse = (500, "")
    assert resolve_model("org/tiny", endpoint=hub.url, download_dir=str(tmp_path)) == first


def test_revision_is_used(hub: StubHub, tmp_path: Path) -> None:
    folder = resolve_model("org/tiny", revision="v2", endpoint=hub.url, download_dir=str(tmp_path))
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3"
    with pytest.raises(ConfigError, match="no revision 'v9'"):
        resolve_model("org/tiny", revision="v9", endpoint=hub.url, download_dir=str(tmp_path))


def test_token_is_sent_with_every_request(hub: StubHub, tmp_path: Path) -> None:
    resolve_model("org/tiny", token="hf_secret", endpoint=hub.url, download_dir=str(tmp_path))
    assert hub.requests
    assert {authorization for _, _, authorization in hub.requests} == {"Bearer hf_secret"}


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        ((404, "RepoNotFound"), "no model on the hub called 'org/tiny'.*spelling"),
        ((401, "RepoNotFound"), "no model on the hub called 'org/tiny'.*HF_TOKEN"),
        ((403, "GatedRepo"), "gated: accept its terms at .*org/tiny.*HF_TOKEN"),
        ((401, "Unauthorized"), "HF_TOKEN"),
        ((500, ""), "are you offline"),
    ],
)
def test_refusals_of_the_hub_become_one_line_with_a_remedy(
    hub: StubHub, tmp_path: Path, refusal: tuple[int, str], words: str
) -> None:
    hub.refuse = refusal
    with pytest.raises(ConfigError, match=words) as caught:
        resolve_model("org/tiny", token="hf_secret", endpoint=hub.url, download_dir=str(tmp_path))
    assert "\n" not in str(caught.value)
    assert "hf_secret" not in str(caught.value)


def test_no_network_and_offline_mode_say_what_to_do(hub: StubHub, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="are you offline"):
        resolve_model("org/tiny", endpoint="http://127.0.0.1:9", download_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="offline mode is on"):
        resolve_model("org/tiny", endpoint=hub.url, download_dir=str(tmp_path), offline=True)


def test_hub_offline_variable_is_respected(hub: StubHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # what HF_HUB_OFFLINE=1 sets at import
    with pytest.raises(ConfigError, match="offline mode is on"):
        resolve_model("org/tiny", endpoint=hub.url, download_dir=str(tmp_path))
    assert hub.requests == []


def test_repository_without_safetensors_is_refused(hub: StubHub, tmp_path: Path) -> None:
    hub.files["a" * 40] = {name: FILES[name] for name in ("config.json", "pytorch_model.bin")}
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        resolve_model("org/tiny", endpoint=hub.url, download_dir=str(tmp_path))


def test_existing_folder_is_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert resolve_model(str(tmp_path)) == tmp_path


def test_folder_without_config_and_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        resolve_model(str(tmp_path))
    file = tmp_path / "model.bin"
    file.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"is a file, and no \.gguf"):
        resolve_model(str(file))


def test_a_gguf_file_is_itself(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert resolve_model(str(file)) == file


@pytest.mark.parametrize("model", ["./not/there", "/not/there", "a/b/c", "", "~/not/there", "bad id/x", "-x/--y"])
def test_what_is_neither_folder_nor_id_is_refused_without_asking_the_hub(model: str, hub: StubHub) -> None:
    with pytest.raises(ConfigError, match=r"hub id \(those look like Qwen/Qwen3-0\.6B\)|no hub id"):
        resolve_model(model, endpoint=hub.url)
    assert hub.requests == []

"""What `kvq upload` sends: the files of an output folder with their hashes, and what speaks against sending them."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from kvq.checkpoint.hashing import git_blob_sha1, read_chunks, sha256_file
from kvq.checkpoint.index import INDEX_NAME, MANIFEST_NAME
from kvq.errors import CheckpointError, OutputError, VerificationError
from kvq.publish.card_metadata import CARD
from kvq.verify.checks import verify_checkpoint
from kvq.verify.report import VerifyReport
from kvq.verify.report_file import find_report
from kvq.verify.report_files import DISTANCE, REPORTS, report_folder
from kvq.verify.structure import load_manifest

DISTANCE_FILE = f"{REPORTS}/distance.json"
# Without config.json no engine loads a repository; without the index none reads several shards.
LOADABLE = ("config.json", INDEX_NAME)
LAST = (*LOADABLE, CARD, MANIFEST_NAME)
SHOWN = 3


@dataclass(frozen=True, slots=True)
class LocalFile:
    """One file to send; `content` is a path, or the bytes themselves where they differ from the folder's."""

    path: str
    content: Path | bytes
    size: int
    sha256: str

    def git_sha1(self) -> str:
        chunks = [self.content] if isinstance(self.content, bytes) else read_chunks(self.content)
        return git_blob_sha1(chunks, self.size)


@dataclass(frozen=True, slots=True)
class Bundle:
    """All that a repository is to hold, by path. `reasons` are the faults that were waved through."""

    folder: Path
    files: dict[str, LocalFile]
    reasons: tuple[str, ...] = ()

    @property
    def early(self) -> list[LocalFile]:
        """What may lie in a repository before it is whole: weights first, as they take longest."""
        files = [file for file in self.files.values() if file.path not in LAST]
        return sorted(files, key=lambda file: (not file.path.endswith(".safetensors"), file.path))

    @property
    def last(self) -> list[LocalFile]:
        """What makes it loadable; sent in one commit when all else is there."""
        return [self.files[path] for path in LAST if path in self.files]


def find_faults(folder: Path, report: VerifyReport) -> list[str]:
    """What speaks against publishing a folder, one sentence each; none if it may go out."""
    faults = []
    if not report.passed:
        problems = [problem for check in report.checks for problem in check.problems]
        more = f" and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        shown = "; ".join(problems[:SHOWN]).replace(f"{folder}/", "")
        faults.append(f"kvq verify finds {shown}{more}")
    if not (folder / MANIFEST_NAME).is_file():
        faults.append(f"there is no {MANIFEST_NAME}, so nothing says what the files should be")
    faults += _report_faults(folder)
    if not (folder / CARD).is_file():
        faults.append(f"there is no {CARD} (`kvq card` writes it)")
    return faults


def _report_faults(folder: Path) -> list[str]:
    try:
        report = find_report(report_folder(folder), Path(DISTANCE_FILE).stem, DISTANCE)
        if report is None:
            return [f"there is no {DISTANCE_FILE} (`kvq evaluate` writes it)"]
        report.expect_weights_of(folder)
    except (CheckpointError, VerificationError) as error:
        return [str(error).replace(f"{folder}/", "").rstrip(".")]
    gates = report.value.get("gates") or []
    missed = [str(gate.get("name")) for gate in gates if isinstance(gate, dict) and gate.get("passed") is not True]
    return [f"{DISTANCE_FILE} says that gates are missed: {', '.join(missed)}"] if missed else []


def check_folder(folder: Path) -> list[str]:
    """`find_faults` of a folder that is verified now. Raises CheckpointError if it is no checkpoint at all.

    A missing manifest is a fault in `find_faults`' own words: what `kvq verify` advises are flags of its own.
    """
    return find_faults(folder, verify_checkpoint(folder, without_manifest=True))


def make_bundle(folder: Path, reasons: tuple[str, ...] = ()) -> Bundle:
    """All files below a folder but hidden ones, with their hashes: the manifest's for what it lists, as verified.

    With `reasons`, the card says that it was sent in spite of them, whatever the folder's card says.
    Raises OutputError for a symbolic link: what it leads to might be anything on this machine.
    """
    listed = _trusted_hashes(folder) if not reasons else {}
    files = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if any(part.startswith(".") for part in name.parts):
            continue
        if path.is_symlink():
            raise OutputError(f"{path} is a symbolic link; only files of the folder itself are sent. Replace it.")
        if path.is_file():
            sha256 = listed.get(name.as_posix()) or sha256_file(path)
            files[name.as_posix()] = LocalFile(name.as_posix(), path, path.stat().st_size, sha256)
    if reasons:
        files[CARD] = _marked_card(folder / CARD, reasons)
    return Bundle(folder, files, reasons)


def _trusted_hashes(folder: Path) -> dict[str, str]:
    manifest = load_manifest(folder)
    return {} if manifest is None else dict(manifest["files"])


def _marked_card(path: Path, reasons: tuple[str, ...]) -> LocalFile:
    """The card with a line above its text that says what was waved through."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    data = mark_card(text, reasons).encode()
    return LocalFile(CARD, data, len(data), hashlib.sha256(data).hexdigest())


def mark_card(text: str, reasons: tuple[str, ...]) -> str:
    """The warning goes below the front matter (which must open the file) and above everything else."""
    warning = f"> **Uploaded with `kvq upload --unverified`:** {'; '.join(reasons)}.\n".replace("\r", " ")
    warning = warning.rstrip("\n").replace("\n", " ") + "\n"
    lines = text.splitlines(keepends=True)
    if lines and lines[0].strip() == "---":
        closing = next((number for number, line in enumerate(lines[1:], 1) if line.strip() == "---"), None)
        if closing is not None:
            return "".join([*lines[: closing + 1], "\n", warning, "\n", *lines[closing + 1 :]])
    return f"{warning}\n{text}"

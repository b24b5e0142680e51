"""What a user is told where a patch does not fit: five lines, the last one what to do."""

from __future__ import annotations

from pathlib import Path

from megatron_r3.patching.cleanroom import commits_since
from megatron_r3.patching.index import PatchFailed

__all__ = ["five_lines", "upstream_commits"]


def five_lines(failed: PatchFailed, num_patches: int, commits: str, next_command: str) -> str:
    """Which patch, where, what it is for, which upstream `commits` touched it, and what to do."""
    return "\n".join(
        (
            f"patch {failed.number} of {num_patches} does not apply: {failed.patch.file.name}",
            f"  at: {failed.where}",
            f"  subject: {failed.patch.subject}",
            f"  upstream commits: {commits}",
            f"  next: {next_command}",
        )
    )


def upstream_commits(
    repo: Path, base: tuple[str, str], path: str, head: str = "HEAD", most: int = 3
) -> str:
    """The newest commits that touched `path` since `base`, which is a name and a commit."""
    name, commit = base
    commits = commits_since(repo, commit, path, head)
    shown = "; ".join(commits[:most]) or "none"
    more = f" and {len(commits) - most} more" if len(commits) > most else ""
    return f"{shown}{more} since {name}"

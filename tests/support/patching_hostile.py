"""A git configuration and environment in which every option that once changed a patch is set."""

from patching_upstream import write

# what a person may have in a git configuration: each of these once changed somebody's patches
_HOSTILE = """
[am]
    threeWay = true
    keepcr = false
    messageid = true
[apply]
    whitespace = error
[color]
    ui = always
[commit]
    gpgsign = true
[core]
    abbrev = 7
    attributesFile = {home}/attributes
    autocrlf = true
    hooksPath = {home}/hooks
    notesRef = refs/notes/mine
[diff]
    algorithm = patience
    context = 9
    external = false
    indentHeuristic = false
    interHunkContext = 40
    mnemonicPrefix = true
    noprefix = true
    orderFile = {home}/order
    renames = copies
    statGraphWidth = 10
    suppressBlankEmpty = true
[format]
    attach = --boundary
    cc = c@example.com
    coverLetter = true
    encodeEmailHeaders = false
    from = true
    filenameMaxLength = 20
    headers = "X-Mine: 1\\n"
    notes = true
    numbered = true
    outputDirectory = {home}
    pretty = oneline
    signature = mine
    subjectPrefix = RFC
    suffix = .txt
    thread = shallow
    to = t@example.com
    useAutoBase = whenAble
[i18n]
    commitEncoding = latin1
    logOutputEncoding = latin1
[log]
    showSignature = true
[mailinfo]
    scissors = true
[rebase]
    autosquash = true
[rerere]
    enabled = true
[user]
    useConfigOnly = true
"""


def hostile(folder, monkeypatch, repo=None):
    """Give the user, and `repo` too, a git configuration and environment full of opinions."""
    home = folder / "home"
    write(home, "attributes", "* text eol=crlf\n*.py -diff\n")
    write(home, "order", "*.sh\n*.py\n")
    write(home, "hooks/applypatch-msg", "#!/bin/sh\nexit 1\n", executable=True)
    write(home, ".gitconfig", _HOSTILE.format(home=home))
    if repo is not None:
        with open(repo / ".git/config", "a") as config:
            config.write(_HOSTILE.format(home=home))
        write(repo, ".git/info/attributes", "*.py -diff\n*.sh diff=mine\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("GIT_DIR", str(folder / "nowhere"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(folder / "nowhere" / "index"))
    monkeypatch.setenv("GIT_DEFAULT_HASH", "sha256")
    monkeypatch.setenv("GIT_DIFF_OPTS", "-u1")
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", "false")

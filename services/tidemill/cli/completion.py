"""`tidemill completion`: scripts that let a shell complete commands, options and names.

A script calls `tidemill` with these variables. The answer is one word per line:

    _TIDEMILL_COMPLETE   complete_bash, for each shell
    _TIDEMILL_WORDS      the words of the command line, one per line
    _TIDEMILL_WORD       the index of the word to complete
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Annotated, Final

import typer

COMPLETE: Final = "_TIDEMILL_COMPLETE"
WORDS: Final = "_TIDEMILL_WORDS"
WORD: Final = "_TIDEMILL_WORD"
PROGRAM: Final = "tidemill"

_BASH: Final = """\
_tidemill_complete() {
    local IFS=$'\\n'
    COMPREPLY=($(_TIDEMILL_COMPLETE=complete_bash _TIDEMILL_WORDS="${COMP_WORDS[*]}" \\
        _TIDEMILL_WORD="$COMP_CWORD" "$1" 2>/dev/null))
}
complete -o default -F _tidemill_complete tidemill"""
_ZSH: Final = """\
#compdef tidemill
_tidemill_complete() {
    local -a found
    found=(${(f)"$(_TIDEMILL_COMPLETE=complete_bash _TIDEMILL_WORDS="${(F)words}" \\
        _TIDEMILL_WORD=$((CURRENT - 1)) tidemill 2>/dev/null)"})
    if (( ${#found} )); then
        compadd -a found
    else
        _files
    fi
}
compdef _tidemill_complete tidemill"""
_FISH: Final = """\
function __tidemill_complete
    set -l before (commandline -opc)
    set -l words (string join \\n -- $before (commandline -ct) | string collect)
    env _TIDEMILL_COMPLETE=complete_bash _TIDEMILL_WORDS="$words" \\
        _TIDEMILL_WORD=(count $before) tidemill 2>/dev/null
end
complete -c tidemill -f -a '(__tidemill_complete)'"""


class Shell(StrEnum):
    """A shell with a script."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


SCRIPTS: Final = {Shell.BASH: _BASH, Shell.ZSH: _ZSH, Shell.FISH: _FISH}


def print_script(
    shell: Annotated[Shell, typer.Argument(help="Shell that reads the script.")],
) -> None:
    """Print the script that lets a shell complete commands, options and names.

    It completes names of topics, consumer groups, processes, broker groups and contexts. It waits
    0.4 s for names at most, and keeps them for 5 s.

    Examples:
    * `source <(tidemill completion bash)`
    * `tidemill completion zsh > ~/.zfunc/_tidemill`
    * `tidemill completion fish > ~/.config/fish/completions/tidemill.fish`
    """
    typer.echo(SCRIPTS[shell])


def is_completing() -> bool:
    """Whether a script has called the program."""
    return COMPLETE in os.environ


def prepare_completion(
    move: Callable[[Sequence[str]], list[str]], root_options: Sequence[str]
) -> None:
    """Give the words of the shell to typer. `move` moves options of the root to the front."""
    # Only here, because the other commands need no completion.
    from typer.completion import get_completion_inspect_parameters

    get_completion_inspect_parameters()  # It also lets typer know the shells.
    words = [_unquoted(word) for word in os.environ.get(WORDS, "").split("\n")]
    given = os.environ.get(WORD, "")
    index = int(given) if given.isdecimal() else 1
    before, incomplete = words[1:index], "".join(words[index : index + 1])
    # The value of the last option is the word to complete.
    last = before.pop() if before and before[-1].startswith("-") else None
    moved = [] if last in root_options else move(before)
    moved += [] if last is None else [last]
    os.environ["COMP_WORDS"] = shlex.join([PROGRAM, *moved, incomplete])
    os.environ["COMP_CWORD"] = str(1 + len(moved))


def _unquoted(word: str) -> str:
    """Return a word without the quotes of the shell, or as it is while a quote is open."""
    try:
        return "".join(shlex.split(word))
    except ValueError:
        return word.lstrip("\"'")

"""The `hf-sparse-prr` command. Its subcommands live in `hf_sparse_prr.commands`, one file each."""

from __future__ import annotations

import sys
from importlib.util import find_spec

REMEDY = "pip install 'hf_sparse_prr[demo]'"


def main() -> None:
    """Run the command line; without the packages that draw it, say in one line how to get them."""
    missing = [name for name in ("typer", "rich") if find_spec(name) is None]
    if missing:
        sys.exit(f"hf-sparse-prr needs {' and '.join(missing)}, not installed here. Remedy: {REMEDY}")
    try:
        from hf_sparse_prr.commands import app  # takes seconds, in which Ctrl-C may come

        app()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()

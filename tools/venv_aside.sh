# shellcheck shell=bash
# A new environment in the place of an old one, which comes back if the new one is not finished.
# (An environment holds its own path, so it cannot be made elsewhere and moved.)

set_aside() { # set_aside DIR: make room for a new environment; refuse to remove anything else
    local folder=${1%/}
    if [[ -z $folder || $folder == -* ]]; then
        echo "error: '$1' is no folder for an environment; --help says what goes where" >&2
        exit 2
    fi
    if [[ -d $folder && ! -e $folder/pyvenv.cfg && -n $(ls -A "$folder") ]]; then
        echo "error: $folder holds something else than an environment (no pyvenv.cfg):" \
            "remove it yourself, or name another folder" >&2
        exit 2
    fi
    NEW_VENV=$folder OLD_VENV=$folder.set-aside
    if [[ (-e $OLD_VENV || -L $OLD_VENV) && ! -e $NEW_VENV/.ready ]]; then
        rm -rf "$NEW_VENV" # begun by a process that was killed: the old one still counts
    elif [[ -e $NEW_VENV || -L $NEW_VENV ]]; then
        rm -rf "$OLD_VENV"
        mv "$NEW_VENV" "$OLD_VENV"
    fi
    trap put_back EXIT
    trap 'exit 1' HUP INT TERM
}

put_back() { # at the end, whatever it was
    local status=$?
    if [[ -e $NEW_VENV/.ready ]]; then
        rm -rf "$OLD_VENV"
    elif [[ -e $OLD_VENV || -L $OLD_VENV ]]; then
        rm -rf "$NEW_VENV"
        mv "$OLD_VENV" "$NEW_VENV"
        echo "error: the new environment was not finished; $NEW_VENV is the old one again" >&2
    fi
    exit "$status"
}

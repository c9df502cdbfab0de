#!/bin/sh
# A command of older documents; other names of this file are other commands. `primus compat --help` tells more.
exec primus compat "${0##*/}" "$@"

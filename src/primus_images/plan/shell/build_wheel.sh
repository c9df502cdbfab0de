set -e
mkdir /tmp/source
cd /tmp/source
PATH="${2%/*}:$PATH"
case "$1" in
*.zip) "$2" -m zipfile -e "$1" . ;;
*) tar -xf "$1" --no-same-owner ;;
esac
cd ./*
eval "$PREPARE"
exec "$2" -m pip wheel --no-index --no-deps --no-build-isolation --no-cache-dir --wheel-dir /out .

case ":$PATH:" in
*:@OWN@:*) ;;
*) PATH="@OWN@:@BIN@:$PATH:@COMMANDS@" ;;
esac
export PATH
if [ -n "${BASH_VERSION-}" ]; then
    # Status 124 tells bash to try again with the completion that argcomplete has registered by then.
    _primus_first_tab() { eval "$(register-python-argcomplete primus)" && return 124; }
    complete -F _primus_first_tab primus
fi

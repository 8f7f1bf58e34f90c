setup_rabbitmq() {
    sh .ci/packages rabbitmq-server:rabbitmq-server python3-pika:-
    # It has one connection that lasts.
    share=10
}

zoo_rabbitmq() {
    scratch
    port=$(free_port)
    echo '[].' >"$dir/plugins"
    HOME=$dir ERL_EPMD_PORT=$(free_port) ERL_EPMD_ADDRESS=127.0.0.1
    RABBITMQ_MNESIA_BASE=$dir/db RABBITMQ_LOG_BASE=$dir/log RABBITMQ_NODENAME=zoo@localhost RABBITMQ_DIST_PORT=$(free_port)
    RABBITMQ_NODE_IP_ADDRESS=127.0.0.1 RABBITMQ_NODE_PORT=$port RABBITMQ_ENABLED_PLUGINS_FILE=$dir/plugins
    RABBITMQ_CONF_ENV_FILE=/dev/null RABBITMQ_CONFIG_FILE=$dir/none RABBITMQ_ADVANCED_CONFIG_FILE=$dir/none
    export HOME ERL_EPMD_PORT ERL_EPMD_ADDRESS RABBITMQ_MNESIA_BASE RABBITMQ_LOG_BASE RABBITMQ_NODENAME RABBITMQ_DIST_PORT \
        RABBITMQ_NODE_IP_ADDRESS RABBITMQ_NODE_PORT RABBITMQ_ENABLED_PLUGINS_FILE RABBITMQ_CONF_ENV_FILE RABBITMQ_CONFIG_FILE \
        RABBITMQ_ADVANCED_CONFIG_FILE
    # A daemon that the server's start needs, and that outlives it.
    (ERL_EPMD_RELAXED_COMMAND_CHECK=1 under epmd -relaxed_command_check -daemon)
    # What it leaves when it is killed goes there, too.
    start sh -c "cd $dir && exec /usr/lib/rabbitmq/bin/rabbitmq-server"
    done=0
    await 'completed with' && client /usr/bin/python3 tests/programs/zoo/rabbitmq.py "$port" 2000 || done=1
    stop
    epmd -kill >/dev/null 2>&1 || :
    return $done
}

from gem_server.cli import main

main(prog_name="gem-server")

from gem_client.ctl.cli import main

main(prog_name="gem-ctl")

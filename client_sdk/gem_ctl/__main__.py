from gem_ctl.cli import main

main(prog_name="gem-ctl")

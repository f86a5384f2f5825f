from gem_client.ctl import main

main(prog_name="gem-ctl")

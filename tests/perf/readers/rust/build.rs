//! Generates the stubs of the public contract from proto/, without protoc.

const PROTO: &str = "../../../../proto";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let descriptors = protox::compile(["apache/rocketmq/v2/service.proto"], [PROTO])?;
    println!("cargo:rerun-if-changed={PROTO}/apache");
    tonic_prost_build::configure().build_server(false).compile_fds(descriptors)?;
    Ok(())
}

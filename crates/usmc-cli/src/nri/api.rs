//! What of the messages of NRI is used here (containerd/nri, pkg/api/api.proto), and of ttrpc's around them (request.proto, and
//! google/rpc/status.proto). Fields that are not named are skipped; a message that is none is an error.

use std::collections::HashMap;

use prost::Message;

/// The service that a plugin is.
pub const PLUGIN: &str = "nri.pkg.api.v1alpha1.Plugin";
/// The service that a runtime is to plugins.
pub const RUNTIME: &str = "nri.pkg.api.v1alpha1.Runtime";
/// `CREATE_CONTAINER` and `START_CONTAINER` of `Event`, as bits of a subscription.
pub const EVENTS: i32 = 1 << (4 - 1) | 1 << (6 - 1);

/// A call, as ttrpc has it.
#[derive(Clone, PartialEq, Message)]
pub struct Request {
    /// The service's name.
    #[prost(string, tag = "1")]
    pub service: String,
    /// The call's.
    #[prost(string, tag = "2")]
    pub method: String,
    /// Its message.
    #[prost(bytes = "vec", tag = "3")]
    pub payload: Vec<u8>,
}

/// An answer to a call.
#[derive(Clone, PartialEq, Message)]
pub struct Response {
    /// What went wrong, if anything.
    #[prost(message, optional, tag = "1")]
    pub status: Option<Status>,
    /// The answer's message.
    #[prost(bytes = "vec", tag = "2")]
    pub payload: Vec<u8>,
}

/// How a call ended.
#[derive(Clone, PartialEq, Message)]
pub struct Status {
    /// gRPC's code; 0 is success.
    #[prost(int32, tag = "1")]
    pub code: i32,
    /// In words.
    #[prost(string, tag = "2")]
    pub message: String,
}

/// A plugin's name and place among others.
#[derive(Clone, PartialEq, Message)]
pub struct RegisterPlugin {
    /// Letters, digits and `_.+-`.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Two digits; plugins are asked in their order.
    #[prost(string, tag = "2")]
    pub index: String,
}

/// What a runtime says of itself.
#[derive(Clone, PartialEq, Message)]
pub struct Configure {
    /// `containerd`, for example.
    #[prost(string, tag = "2")]
    pub runtime_name: String,
    /// Its version.
    #[prost(string, tag = "3")]
    pub runtime_version: String,
}

/// What a plugin wants to be asked.
#[derive(Clone, PartialEq, Message)]
pub struct Configured {
    /// [`EVENTS`].
    #[prost(int32, tag = "2")]
    pub events: i32,
}

/// Pods and containers that there are, of which nothing is used.
#[derive(Clone, PartialEq, Message)]
pub struct Synchronize {
    /// More follow in another message.
    #[prost(bool, tag = "3")]
    pub more: bool,
}

/// That they have come.
#[derive(Clone, PartialEq, Message)]
pub struct Synchronized {
    /// What [`Synchronize::more`] was: such a plugin may be told in parts.
    #[prost(bool, tag = "2")]
    pub more: bool,
}

/// A container that is about to be created, or to be started.
#[derive(Clone, PartialEq, Message)]
pub struct OfContainer {
    /// Its pod.
    #[prost(message, optional, tag = "1")]
    pub pod: Option<Pod>,
    /// Itself.
    #[prost(message, optional, tag = "2")]
    pub container: Option<Container>,
}

/// `PodSandbox`.
#[derive(Clone, PartialEq, Message)]
pub struct Pod {
    /// Its name.
    #[prost(string, tag = "2")]
    pub name: String,
    /// The namespace of Kubernetes.
    #[prost(string, tag = "4")]
    pub namespace: String,
    /// Labels, Kubernetes' own among them.
    #[prost(map = "string, string", tag = "5")]
    pub labels: HashMap<String, String>,
    /// What its runtime class is to the runtime; empty: the default.
    #[prost(string, tag = "7")]
    pub runtime_handler: String,
    /// What is Linux' own.
    #[prost(message, optional, tag = "8")]
    pub linux: Option<LinuxPod>,
}

/// `LinuxPodSandbox`.
#[derive(Clone, PartialEq, Message)]
pub struct LinuxPod {
    /// Namespaces of the kernel.
    #[prost(message, repeated, tag = "5")]
    pub namespaces: Vec<Namespace>,
}

/// `LinuxNamespace`.
#[derive(Clone, PartialEq, Message)]
pub struct Namespace {
    /// `user`, `network`, `mount`, …
    #[prost(string, tag = "1")]
    pub kind: String,
}

/// `Container`.
#[derive(Clone, PartialEq, Message)]
pub struct Container {
    /// Its name in the pod.
    #[prost(string, tag = "3")]
    pub name: String,
    /// What is started.
    #[prost(string, repeated, tag = "7")]
    pub args: Vec<String>,
    /// Variables, `NAME=VALUE`.
    #[prost(string, repeated, tag = "8")]
    pub env: Vec<String>,
    /// Mounts.
    #[prost(message, repeated, tag = "9")]
    pub mounts: Vec<Mount>,
    /// What is Linux' own.
    #[prost(message, optional, tag = "11")]
    pub linux: Option<LinuxContainer>,
    /// Its first process, once there is one.
    #[prost(uint32, tag = "12")]
    pub pid: u32,
    /// Whom it is started as; older runtimes do not say.
    #[prost(message, optional, tag = "21")]
    pub user: Option<User>,
}

/// `LinuxContainer`.
#[derive(Clone, PartialEq, Message)]
pub struct LinuxContainer {
    /// Namespaces of the kernel.
    #[prost(message, repeated, tag = "1")]
    pub namespaces: Vec<Namespace>,
}

/// A user.
#[derive(Clone, PartialEq, Message)]
pub struct User {
    /// Its number.
    #[prost(uint32, tag = "1")]
    pub uid: u32,
}

/// A mount of a container's.
#[derive(Clone, PartialEq, Message)]
pub struct Mount {
    /// Where it is in the container.
    #[prost(string, tag = "1")]
    pub destination: String,
    /// `bind`, for example.
    #[prost(string, tag = "2")]
    pub kind: String,
    /// What is mounted.
    #[prost(string, tag = "3")]
    pub source: String,
    /// As those of mount(8).
    #[prost(string, repeated, tag = "4")]
    pub options: Vec<String>,
}

/// A variable.
#[derive(Clone, PartialEq, Message)]
pub struct Variable {
    /// Its name; with a `-` before it the variable is removed.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Its value.
    #[prost(string, tag = "2")]
    pub value: String,
}

/// `CreateContainerResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct Created {
    /// What is to be changed.
    #[prost(message, optional, tag = "1")]
    pub adjustment: Option<Adjustment>,
}

/// `ContainerAdjustment`.
#[derive(Clone, PartialEq, Message)]
pub struct Adjustment {
    /// Mounts that are added.
    #[prost(message, repeated, tag = "3")]
    pub mounts: Vec<Mount>,
    /// Variables that are set or removed.
    #[prost(message, repeated, tag = "4")]
    pub env: Vec<Variable>,
}
